"""``oneloop watch``: charts of the metrics of runs in the terminal."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from oneloop.basics.files import printable
from oneloop.tools.run_reader import Follower, number
from oneloop.tools.terminal_charts import COLOURS, chart

_MIN_WIDTH = 56  # minimum columns of a chart next to another
_MIN_PANEL = 36  # of a panel, in a narrower terminal
_CHART = 12  # lines of a chart
_NAMES = 40  # columns of a run's name, step and state in the table of several runs
_VALUE = 15  # columns of a metric in this table


def watch(
    folders: Sequence[Path],
    *,
    metrics: Sequence[str] = (),
    every: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Draw the runs until all are done. A run may begin later.

    Args:
        folders: the run folders.
        metrics: each gets a chart; none: losses, the first metric, gradient norm, throughput.
        every: seconds between two reads.
        once: draw the runs once. So does a call without a terminal, or if all runs are done.
        console: the terminal; None: the process's own.
    """
    console = console or Console()
    runs = [Follower(folder) for folder in folders]

    # Without a terminal, wait here for runs that have not begun.
    if not console.is_terminal and not once:
        for run in runs:
            if not run.folder.is_dir():
                console.print(Text(_waiting(run)), soft_wrap=True)
                while not run.read():
                    time.sleep(every)

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

    # Read what was written between the last read and the end.
    for run in runs:
        run.read()
    console.print(view(runs, metrics, width=console.width, height=0))


def view(
    runs: Sequence[Follower], metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    """Return one run as a table and charts, or several as a row each and in the same charts.

    Args:
        runs: the runs, which have been read.
        metrics: each gets a chart; none: the usual ones.
        width: columns.
        height: lines, at most; 0: no limit.
    """
    each = max(_MIN_PANEL, width - 1)
    names = [run.folder.resolve().name for run in runs]
    titles = []
    for name, run in zip(names, runs, strict=True):
        titles.append(printable(name if names.count(name) == 1 else str(run.folder)))
    if len(runs) == 1:
        return _panel(runs[0], titles[0], metrics, width=each, height=height)
    return _together(runs, titles, metrics, width=each, height=height)


def _panel(
    run: Follower, title: str, metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    if not run.has_metrics:
        return Panel(Text(_waiting(run)), title=Text(title), width=width)
    groups = [[name] for name in metrics] or _usual([run])
    head = _head(run, max(1, height - _CHART - 2) if height else 99)
    charts = partial(_chart, run)
    return _arranged(title, head, groups, charts, width=width, height=height)


def _together(
    runs: Sequence[Follower],
    titles: Sequence[str],
    metrics: Sequence[str],
    *,
    width: int,
    height: int,
) -> RenderableType:
    """Return a row of newest values for each run, and charts with a curve for each."""
    groups = [[name] for name in metrics]
    if not groups:
        groups = [[name] for group in _usual(runs) for name in group]

    # Show the newest values of what is in the charts, as many as fit. The colours of the names are
    # those of the curves.
    shown = [*dict.fromkeys(name for group in groups for name in group)]
    shown = shown[: max(1, (width - _NAMES) // _VALUE)]
    heads = [Column(Text(printable(name))) for name in ("run", "step", "state", *shown)]
    head = Table(*heads, show_edge=False, pad_edge=False)
    for run, title, colour in zip(runs, titles, cycle(COLOURS), strict=False):
        last = _newest(run)
        step = f"{last['step']:,}" if last else ""
        state = run.exit_reason or f"last line {run.age:,.0f} s ago"
        if not run.has_metrics:
            state = _waiting(run)
        values = [Text(_short(last[name]) if name in last else "") for name in shown]
        head.add_row(Text(title, style=colour), step, Text(state), *values)

    def overlaid(names: Sequence[str], *, width: int) -> RenderableType:
        (name,) = names
        series = []
        for run, title in zip(runs, titles, strict=True):
            series.append((title, _points(run, name).get(name, [])))
        return chart(series, head=f"{name}  ", width=width, height=_CHART - 3, named=False)

    return _arranged(f"{len(runs)} runs", head, groups, overlaid, width=width, height=height)


def _arranged(
    title: str,
    head: Table,
    groups: Sequence[Sequence[str]],
    draw: Callable[..., RenderableType],
    *,
    width: int,
    height: int,
) -> RenderableType:
    """Return a panel with a table and, below it, as many charts as fit.

    Args:
        title: of the panel.
        head: the table.
        groups: names of the metrics of each chart.
        draw: returns the chart of these metrics, of a ``width``.
        width: columns.
        height: lines, at most; 0: no limit.
    """
    columns = 2 if width >= 2 * _MIN_WIDTH else 1
    if height:
        lines = head.row_count + (2 if head.show_header else 0)
        rows = max(1, (height - lines - 2) // _CHART)
        groups = groups[: rows * columns]
    charts = [draw(names, width=(width - 5) // columns) for names in groups]
    grid = Table.grid(*([""] * columns), padding=(0, 1, 0, 0))
    for at in range(0, len(charts), columns):
        grid.add_row(*charts[at : at + columns])
    return Panel(Group(head, grid), title=Text(title), width=width)


def _waiting(run: Follower) -> str:
    """Return what a run without metrics waits for."""
    if run.folder.is_dir():
        return "no metrics yet"
    return f"waiting: {printable(str(run.folder))} does not exist yet (Ctrl-C ends)"


_RATES = ("train/grad_norm", "speed/tokens_per_second", "train/samples_per_second")


def _usual(runs: Sequence[Follower]) -> list[list[str]]:
    """Return the metrics of each chart if the user names none."""
    lines = (line for run in runs for line in run.lines)
    names = dict.fromkeys(name for line in lines for name in line if "/" in name)
    losses: list[str] = [name for name in ("train/loss", "eval/loss") if name in names]
    metrics = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    rates = [name for name in _RATES if name in names]
    return [losses, *([name] for name in [*metrics[:1], *rates[:2]])]


def _newest(run: Follower) -> dict[str, Any]:
    """Return the newest value of each metric of the raw weights, and the newest step."""
    last: dict[str, Any] = {}
    for line in run.lines:
        if line.get("weights", "raw") == "raw":
            last |= line
    return last


def _head(run: Follower, most: int) -> Table:
    """Return the newest values; ``most`` limits the rows, from the end of the metrics."""
    table = Table.grid(padding=(0, 2))
    last = _newest(run)
    events: Counter[str] = Counter()  # in order of appearance
    for line in run.lines:
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
        series |= _points(run, name)
    head = "" if series else ", ".join(names)
    return chart(list(series.items()), head=head, width=width, height=_CHART - 3)


def _points(run: Follower, name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of a metric by weights; the raw weights have the name of the metric."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in run.lines:
        if name in line:
            weights = line.get("weights", "raw")
            label = name if weights == "raw" else f"{name} ({weights})"
            series.setdefault(label, []).append((line["step"], number(line[name])))
    return series


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(value)
