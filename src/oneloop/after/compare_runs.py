"""``oneloop compare``: settings, metrics and curves of several runs, side by side in the
terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from oneloop.after.first_difference import parting
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.show.run_reader import Record, differences, distinct, read_record
from oneloop.show.terminal import metric
from oneloop.show.watch import chart

_HEIGHT = 8  # lines of a chart


def compare(folders: Sequence[Path], *, metrics: Sequence[str] = ()) -> None:
    """Print tables of the differing keys and of the final and best metrics, a chart of each of
    ``metrics`` (none given: losses and the first metric), and whether the runs are bit-identical.
    Raise BadInput if a folder holds no run."""
    console = Console()
    for part in _parts(folders, metrics, console.width):
        console.print(part)


def _parts(folders: Sequence[Path], metrics: Sequence[str], width: int) -> Iterator[RenderableType]:
    try:
        runs = distinct([read_record(folder) for folder in folders])
    except ValueError as error:
        raise BadInput(str(error)) from error
    names = [run.name for run in runs]
    changed = differences(runs)
    yield (
        _table(["key", *names], changed)
        if changed
        else Text("the recipes are equal, except for run.dir")
    )
    yield _table(["metric", *names], [*_results(runs)])
    evals = [
        name
        for run in runs
        for name in run.metrics()
        if name.startswith("eval/") and name != "eval/loss"
    ]
    drawn = [
        name
        for name in ("train/loss", "eval/loss", *evals[:1])
        if any(len(_curve(r, name)) > 1 for r in runs)
    ]
    for name in metrics or drawn:
        series = [(run.name, _curve(run, name)) for run in runs]
        yield chart(series, head=f"{name}:  ", width=max(width, 36), height=_HEIGHT)
    for folder in folders[1:]:
        try:
            lines = parting(folders[0], folder)[1]
        except BadInput as error:
            lines = [f"not compared bit by bit: {error}"]
        yield Text(printable(f"{folders[0]} and {folder}: {'; '.join(lines)}"))


def _results(runs: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    summaries = [run.summary for run in runs]
    yield "step", *("" if run.last is None else f"{run.last:,}" for run in runs)
    for name in dict.fromkeys(
        name for run in runs for name in run.metrics() if name.startswith(("eval/", "test/"))
    ):
        last = [run.curve(name, "raw")[1][-1:] for run in runs]
        yield name, *(metric(values[0]) if values else "" for values in last)
    best = [(summary.get("best") or {}) for summary in summaries]
    for name in dict.fromkeys(one["metric"] for one in best if one.get("value") is not None):
        own = [
            one if one.get("metric") == name and one.get("value") is not None else None
            for one in best
        ]
        yield (
            f"best {name}",
            *(
                "" if one is None else f"{metric(one['value'])} at step {one['step']:,}"
                for one in own
            ),
        )
    yield (
        "seconds",
        *(f"{summary['seconds']:,.1f}" if "seconds" in summary else "" for summary in summaries),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(
        *(Column(Text(printable(name))) for name in head), show_edge=False, pad_edge=False
    )
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


def _curve(run: Record, name: str) -> list[tuple[int, float]]:
    """Return the points of a metric; of an evaluation those of the raw weights, not of EMAs."""
    return [
        *zip(*run.curve(name, "raw" if "raw" in run.curves.get(name, ()) else None), strict=True)
    ]
