"""``oneloop watch``: charts of the metrics of runs in the terminal."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oneloop.basics.files import printable
from oneloop.tools.run_reader import Follower, number
from oneloop.tools.terminal_charts import chart

_MIN_WIDTH = 56  # minimum columns of a run
_MIN_PANEL = 36  # of a panel, in a narrower terminal
_CHART = 12  # lines of a chart


def watch(
    folders: Sequence[Path],
    *,
    metrics: Sequence[str] = (),
    every: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Draw the runs until all are done.

    Args:
        folders: the run folders.
        metrics: each gets a chart; none: losses, the first metric, gradient norm, throughput.
        every: seconds between two reads.
        once: draw the runs once. So does a call without a terminal, or if all runs are done.
        console: the terminal; None: the process's own.
    """
    console = console or Console()
    runs = [Follower(folder) for folder in folders]

    # Draw once if there is nothing to wait for.
    if once or not console.is_terminal or all(run.read() and run.done for run in runs):
        for run in runs:
            run.read()
        console.print(view(runs, metrics, width=console.width, height=0))
        return

    # Draw over the whole screen until all are done, and then leave the charts in the terminal.
    with Live(console=console, auto_refresh=False, screen=True) as shown:
        while True:
            for run in runs:
                run.read()
            drawn = view(runs, metrics, width=console.width, height=console.height)
            shown.update(drawn, refresh=True)
            if all(run.done for run in runs):  # a stopped or failed run can be started again
                break
            time.sleep(every)
    console.print(view(runs, metrics, width=console.width, height=0))


def view(
    runs: Sequence[Follower], metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    """Return all runs, side by side if the width suffices.

    Args:
        runs: the runs, which have been read.
        metrics: each gets a chart; none: the usual ones.
        width: columns.
        height: lines, at most; 0: no limit.
    """
    across = max(1, min(len(runs), width // _MIN_WIDTH))  # panels in a row
    each = max(_MIN_PANEL, width // across - 1)
    rows = math.ceil(len(runs) / across)
    lines = height // rows if height else 0
    names = [run.folder.resolve().name for run in runs]
    panels = []
    for name, run in zip(names, runs, strict=True):
        title = printable(name if names.count(name) == 1 else str(run.folder))
        panels.append(_panel(run, title, metrics, width=each, height=lines))
    if across == 1:
        return Group(*panels)
    return Columns(panels, width=each, padding=(0, 1, 0, 0))


def _panel(
    run: Follower, title: str, metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    if not any("/" in name for line in run.lines for name in line):
        return Panel("no metrics yet", title=Text(title), width=width)
    groups = [[name] for name in metrics] or _usual(run)
    columns = 2 if width >= 2 * _MIN_WIDTH else 1
    head = _head(run, max(1, height - _CHART - 2) if height else 99)
    if height:
        # Leave out the charts that do not fit.
        rows = max(1, (height - head.row_count - 2) // _CHART)
        groups = groups[: rows * columns]
    charts = [_chart(run, names, width=(width - 5) // columns) for names in groups]
    grid = Table.grid(*([""] * columns), padding=(0, 1, 0, 0))
    for at in range(0, len(charts), columns):
        grid.add_row(*charts[at : at + columns])
    return Panel(Group(head, grid), title=Text(title), width=width)


_RATES = ("train/grad_norm", "speed/tokens_per_second", "train/samples_per_second")


def _usual(run: Follower) -> list[list[str]]:
    """Return the metrics of each chart if the user names none."""
    names = dict.fromkeys(name for line in run.lines for name in line if "/" in name)
    losses: list[str] = [name for name in ("train/loss", "eval/loss") if name in names]
    metrics = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    rates = [name for name in _RATES if name in names]
    return [losses, *([name] for name in [*metrics[:1], *rates[:2]])]


def _head(run: Follower, most: int) -> Table:
    """Return the newest values; ``most`` limits the rows, from the end of the metrics."""
    table = Table.grid(padding=(0, 2))
    # Collect the newest value of each metric of the raw weights, and count the events.
    last: dict[str, Any] = {}
    events: Counter[str] = Counter()  # in order of appearance
    for line in run.lines:
        if line.get("weights", "raw") == "raw":
            last |= line
        if "event" in line:
            events[printable(line["event"])] += 1
    when = run.exit_reason or f"last line {run.age:,.0f} s ago"
    table.add_row("step", f"{last['step']:,}", Text(when))

    # Show loss and learning rate first, and then the evaluations.
    names = [name for name in ("train/loss", "train/lr", *last) if name in last]
    shown = [
        name
        for name in dict.fromkeys(names)
        if name.startswith(("train/loss", "train/lr", "eval/"))
    ]
    for name in shown[: max(1, most - 4)]:
        table.add_row(Text(printable(name)), Text(_short(last[name])))

    # Show the three largest shares of the time, the speed and the events.
    shares = []
    for name, value in last.items():
        if name.startswith("share/"):
            shares.append((name.partition("/")[2], number(value)))
    if shares:
        shares.sort(key=lambda part: -part[1])
        text = ", ".join(f"{100 * share:.0f} % {phase}" for phase, share in shares[:3])
        table.add_row("time, latest", Text(printable(text)))
    if "train/samples_per_second" in last:
        table.add_row("speed, latest", f"{number(last['train/samples_per_second']):,.0f} samples/s")
    if events:
        text = ", ".join(f"{kind}: {count}" for kind, count in events.items())
        if run.sampled:
            text += " (in the sampled lines)"
        table.add_row("events", Text(text))
    return table


def _chart(run: Follower, names: Sequence[str], *, width: int) -> RenderableType:
    series: dict[str, list[tuple[int, float]]] = {}
    for name in names:
        for line in run.lines:
            if name in line:
                weights = line.get("weights", "raw")
                label = name if weights == "raw" else f"{name} ({weights})"
                point = (line["step"], number(line[name]))
                series.setdefault(label, []).append(point)
    head = "" if series else ", ".join(names)
    return chart(list(series.items()), head=head, width=width, height=_CHART - 3)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(value)
