"""``oneloop compare``: settings, metrics and curves of runs, side by side in the terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.show.terminal import metric
from oneloop.tools.compare.first_difference import parting
from oneloop.tools.run_reader import Record, differences, distinct, read_record
from oneloop.tools.terminal_charts import chart

_HEIGHT = 8  # lines of a chart


def compare(folders: Sequence[Path], *, metrics: Sequence[str] = ()) -> None:
    """Print differing keys, final and best metrics, charts, and whether runs are bit-identical.

    Args:
        folders: Run folders; the first one is compared with each other one.
        metrics: Names of the charts (none: losses and the first metric).

    Raises:
        BadInput: A folder holds no run.
    """
    console = Console()
    for part in _parts(folders, metrics, console.width):
        console.print(part)


def _parts(folders: Sequence[Path], metrics: Sequence[str], width: int) -> Iterator[RenderableType]:
    runs = distinct([read_record(folder) for folder in folders])
    names = [run.name for run in runs]
    changed = differences(runs)
    if changed:
        yield _table(["key", *names], changed)
    else:
        yield Text("the recipes are equal, except for run.dir")
    yield _table(["metric", *names], [*_results(runs)])

    # Draw the curves.
    for name in metrics or _drawn(runs):
        series = [(run.name, _curve(run, name)) for run in runs]
        yield chart(series, head=f"{name}:  ", width=max(width, 36), height=_HEIGHT)

    # Compare the hashes in the logs. Name a reason against it once for all runs: often, the first
    # run has no hashes.
    reasons = dict[str, list[str]]()
    for folder in folders[1:]:
        try:
            lines = parting(folders[0], folder)[1]
        except BadInput as error:
            reasons.setdefault(str(error), []).append(str(folder))
            continue
        yield Text(printable(f"{folders[0]} and {folder}: {'; '.join(lines)}"))
    for reason, others in reasons.items():
        both = f"{folders[0]} and {', '.join(others)}"
        yield Text(printable(f"{both}: not compared bit by bit: {reason}"))


def _drawn(runs: Sequence[Record]) -> list[str]:
    """Return the losses and the first metric of an evaluation, if they have a curve."""
    candidates = ["train/loss", "eval/loss"]
    for name in _names(runs, ("eval/",)):
        if name != "eval/loss":
            candidates.append(name)
            break
    return [name for name in candidates if any(len(_curve(run, name)) > 1 for run in runs)]


def _names(runs: Sequence[Record], beginnings: tuple[str, ...]) -> list[str]:
    """Return the names of metrics that begin with one of these words, in order, once each."""
    names = dict[str, None]()
    for run in runs:
        for name in run.metrics():
            if name.startswith(beginnings):
                names[name] = None
    return list(names)


def _results(runs: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    # The last value of each metric of an evaluation.
    yield "step", *("" if run.last is None else f"{run.last:,}" for run in runs)
    for name in _names(runs, ("eval/", "test/")):
        cells = []
        for run in runs:
            values = run.curve(name, "raw")[1]
            cells.append(metric(values[-1]) if values else "")
        yield name, *cells

    # The best value of each metric that a run was judged by.
    best = [run.summary.get("best") or {} for run in runs]
    chosen = dict.fromkeys(one["metric"] for one in best if one.get("value") is not None)
    for name in chosen:
        cells = []
        for one in best:
            value = one.get("value")
            if one.get("metric") == name and value is not None:
                cells.append(f"{metric(value)} at step {one['step']:,}")
            else:
                cells.append("")
        yield f"best {name}", *cells

    seconds = [run.summary.get("seconds") for run in runs]
    yield "seconds", *("" if value is None else f"{value:,.1f}" for value in seconds)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    columns = [Column(Text(printable(name))) for name in head]
    table = Table(*columns, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


def _curve(run: Record, name: str) -> list[tuple[int, float]]:
    """Return the points of a metric; of an evaluation those of the raw weights, not of EMAs."""
    weights = "raw" if "raw" in run.curves.get(name, ()) else None
    return list(zip(*run.curve(name, weights), strict=True))
