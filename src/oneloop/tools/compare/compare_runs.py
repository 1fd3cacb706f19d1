"""``oneloop compare``: settings, metrics and curves of runs, side by side in the terminal."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.tools.compare.first_difference import parting
from oneloop.tools.run_reader import (
    LOG,
    Point,
    Record,
    differences,
    distinct,
    entries,
    number,
    read_record,
)
from oneloop.tools.terminal_charts import chart

_HEIGHT = 12  # lines of a chart, with its legend and its axis
_SPEED = "train/samples_per_second"
_RATES = ("train/grad_norm", "speed/tokens_per_second", _SPEED)


def compare(folders: Sequence[Path], *, metrics: Sequence[str] = ()) -> None:
    """Print differing keys, final and best metrics, charts, and whether runs are bit-identical.

    Args:
        folders: Run folders; the first one is compared with each other one.
        metrics: Names of the charts (none: losses, the first metric, gradient norm, throughput).

    Raises:
        BadInput: A folder holds no run.
    """
    console = Console()
    runs = distinct([read_record(folder) for folder in folders])
    changed = differences(runs)
    if changed:
        console.print(_table(["key", *(run.name for run in runs)], changed))
    else:
        console.print("the recipes are equal, except for run.dir")
    console.print(view(runs, metrics, width=console.width))

    # Compare the hashes in the logs. Name a reason against it once for all runs: often, the first
    # run has no hashes.
    reasons = dict[str, list[str]]()
    for folder in folders[1:]:
        try:
            lines = parting(folders[0], folder)[1]
        except BadInput as error:
            reasons.setdefault(str(error), []).append(str(folder))
            continue
        console.print(Text(printable(f"{folders[0]} and {folder}: {'; '.join(lines)}")))
    for reason, others in reasons.items():
        both = f"{folders[0]} and {', '.join(others)}"
        console.print(Text(printable(f"{both}: not compared bit by bit: {reason}")))


def view(
    runs: Sequence[Record], metrics: Sequence[str], *, width: int, height: int = 0
) -> RenderableType:
    """Return a table with a column for each run, and charts.

    The charts of several runs have a curve for each; those of one run also show the EMA weights,
    and both losses together.

    Args:
        runs: the runs, with different names.
        metrics: each gets a chart; none: losses, the first metric, gradient norm, throughput.
        width: columns.
        height: lines, at most; 0: no limit.
    """
    groups = [[name] for name in metrics] or _usual(runs)
    rows = [*_rows(runs)]
    if height:
        rows = rows[: max(1, height - 2 - _HEIGHT)]
        groups = groups[: max(1, (height - 2 - len(rows)) // _HEIGHT)]
    parts: list[RenderableType] = []
    parts.append(_table(["metric", *(run.name for run in runs)], rows, one_line=height > 0))
    for names in groups:
        series = [curve for name in names for curve in _curves(runs, name)]
        head = f"{', '.join(names)}:  " if len(runs) > 1 or not series else ""
        parts.append(chart(series, head=head, width=max(width, 36), height=_HEIGHT - 3))
    return Group(*parts)


def _usual(runs: Sequence[Record]) -> list[list[str]]:
    """Return the metrics of each chart if the user names none."""
    losses = _logged(runs, ("train/loss", "eval/loss"))
    evaluated = _logged(runs, ("eval/",))
    metrics = [name for name in evaluated if name not in losses]
    rates = [name for name in _RATES if _logged(runs, (name,))]

    # The charts of several runs have one metric each.
    groups = [losses]
    if len(runs) > 1:
        groups = [[name] for name in losses]
    for name in (*metrics[:1], *rates[:2]):
        groups.append([name])
    return groups


def _logged(runs: Sequence[Record], beginnings: tuple[str, ...]) -> list[str]:
    """Return the names of metrics that begin with one of these words, in order, once each."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    return [name for name in names if name.startswith(beginnings)]


def _rows(runs: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: a title, and a cell for each run."""
    yield "state", *map(state, runs)
    yield "step", *(_short(run.last) for run in runs)
    for name in ("train/loss", "train/lr", _SPEED):
        yield name.replace(_SPEED, "samples/s"), *(_newest(run, name) for run in runs)
    yield "time, latest", *map(_shares, runs)
    yield "events", *map(_events, runs)
    for name in _logged(runs, ("eval/", "test/")):
        yield name, *(_newest(run, name) for run in runs)

    # The best value of each metric that a run was judged by.
    best: dict[str, dict[str, str]] = {}
    for run in runs:
        judged = entries(run.summary.get("best"))
        if judged.get("value") is not None:
            cell = f"{_short(judged['value'])} at step {_short(judged.get('step'))}"
            best.setdefault(f"best {judged.get('metric')}", {})[run.name] = cell
    for title, cells in best.items():
        yield title, *(cells.get(run.name, "") for run in runs)
    yield "seconds", *(_short(run.summary.get("seconds")) for run in runs)


def state(run: Record) -> str:
    """Return why a run has ended, how old its newest line is, or what it waits for."""
    if run.curves:
        age = time.time() - (run.folder / LOG).stat().st_mtime
        return str(run.summary.get("exit_reason") or f"last line {age:,.0f} s ago")
    if run.folder.is_dir():
        return "no metrics yet"
    return f"waiting: {run.folder} does not exist yet (Ctrl-C ends)"


def _points(run: Record, name: str) -> list[Point]:
    """Return the points of a metric; of an evaluation those of the raw weights, not of EMAs."""
    return run.points(name, "raw" if "raw" in run.curves.get(name, ()) else None)


def _newest(run: Record, name: str) -> str:
    points = _points(run, name)
    return _short(points[-1][1]) if points else ""


def _shares(run: Record) -> str:
    """Return the three phases with the largest shares of the time at the last log line."""
    shares = []
    for name in _logged([run], ("share/",)):
        share = _points(run, name)[-1][1]
        shares.append((share, f"{100 * share:.0f} % {name.removeprefix('share/')}"))
    return ", ".join(text for _, text in sorted(shares, reverse=True)[:3])


def _events(run: Record) -> str:
    counts = run.event_counts.items()
    return ", ".join(f"{kind}: {count}" for kind, count in counts)


def _curves(runs: Sequence[Record], name: str) -> list[tuple[str, list[Point]]]:
    """Return names and points of the curves of a metric: of runs, or of the weights of one run."""
    if len(runs) > 1:
        return [(run.name, _points(run, name)) for run in runs]
    curves = []
    for weights, curve in runs[0].curves.get(name, {}).items():
        title = name if weights in ("", "raw") else f"{name} ({weights})"
        curves.append((title, curve.points))
    return curves


def _short(value: Any) -> str:
    """Return a number as text: whole from 10,000 on, else with five digits; empty for None."""
    # A damaged summary may hold something else, which is shown as nan.
    if value is None:
        return ""
    value = number(value)
    if 1e4 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, one_line: bool = False) -> Table:
    """Return a table; ``one_line``: long cells are cut and not wrapped."""
    columns = [Column(Text(printable(name)), no_wrap=one_line) for name in head]
    table = Table(*columns, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
