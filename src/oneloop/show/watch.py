"""``oneloop watch``: charts of the metrics of runs in the terminal."""

import math
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import plotille
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oneloop.basics.files import printable
from oneloop.show.run_reader import Follower, number

PlotCurve = tuple[Sequence[float], Sequence[float], str | None]
"""steps, finite values (at least one), and a terminal colour"""


def plotted(curves: Sequence[PlotCurve], *, width: int, height: int) -> list[str]:
    """Return the lines of a chart of one or more curves; colours become terminal escape codes.

    ``width`` (characters) and ``height`` (lines) are the size of the area inside the axes."""
    low = min(min(values) for _, values, _ in curves)
    high = max(max(values) for _, values, _ in curves)
    row = _round((high - low or max(abs(high) * 0.1, 1e-9)) / (height - 1.5))  # between two labels
    bottom = row * math.floor(low / row)
    # a share: the axis ends at 1
    if high <= 1 < (top := bottom + row * (height - 1)) <= 1 + bottom:
        bottom -= top - 1
    figure: Any = plotille.Figure()
    figure.width, figure.height = width, height
    figure.color_mode, figure.with_colors = "names", any(colour for *_, colour in curves)
    figure.x_label = figure.y_label = ""
    figure.origin = False  # it would be drawn in a curve's colour
    figure.x_ticks_fkt = lambda low, _: f"{low:,.0f}"
    # the middle of a line
    figure.y_ticks_fkt = lambda low, _: f"{row * round(low / row + 0.5, 2) + 0.0:.4g}"
    for steps, values, colour in curves:
        draw = figure.plot if len(steps) > 1 else figure.scatter
        draw(steps, values, lc=colour, marker="•" if len(steps) <= 20 else None)
    column = max(
        1.0, _round(max(1, *(steps[-1] for steps, _, _ in curves)) / max(1, width // _LABEL))
    )
    figure.set_x_limits(0, column * width / _LABEL)
    figure.set_y_limits(bottom - row / 2, bottom + row * (height - 0.5))
    return (
        str(figure.show())
        .replace("-> ()", "")
        .replace("\N{BRAILLE PATTERN BLANK}", " ")
        .splitlines()[2:]
    )


def _round(least: float) -> float:
    """Return the smallest round number (one digit, 1.5 or 2.5, times a power of ten) that is not
    below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(
        f * power for f in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * power >= least * (1 - 1e-9)
    )


_LABEL = 10  # columns between two labels of plotille's x axis
_MIN_WIDTH = 56  # minimum columns of a run
_MIN_PANEL = 36
_CHART = 12  # lines of a chart
COLOURS = [
    f"bright_{colour}" for colour in ("blue", "yellow", "green", "magenta", "cyan", "red")
] + ["blue", "green"]


def watch(
    folders: Sequence[Path],
    *,
    metrics: Sequence[str] = (),
    every: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Draw the runs until all are done; draw them once if ``once``, if they are done, or without a
    terminal.

    Each of the ``metrics`` gets a chart (none given: losses, the first metric, gradient norm,
    throughput). The runs are read again after ``every`` seconds."""
    console = console or Console()
    runs = [Follower(folder) for folder in folders]
    if once or not console.is_terminal or all(run.read() and run.done for run in runs):
        for run in runs:
            run.read()
        console.print(view(runs, metrics, width=console.width, height=0))
        return
    with Live(console=console, auto_refresh=False, screen=True) as shown:
        while True:
            for run in runs:
                run.read()
            shown.update(
                view(runs, metrics, width=console.width, height=console.height), refresh=True
            )
            if all(run.done for run in runs):  # a stopped or failed run can be started again
                break
            time.sleep(every)
    console.print(view(runs, metrics, width=console.width, height=0))


def view(
    runs: Sequence[Follower], metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    """Return all runs, side by side if the width suffices, in at most ``height`` lines (0: no
    limit)."""
    across = max(1, min(len(runs), width // _MIN_WIDTH))
    each = max(_MIN_PANEL, width // across - 1)
    rows = math.ceil(len(runs) / across)
    lines = height // rows if height else 0
    names = [run.folder.resolve().name for run in runs]
    titles = [
        name if names.count(name) == 1 else str(run.folder)
        for name, run in zip(names, runs, strict=True)
    ]
    titles = [printable(title) for title in titles]
    panels = [
        _panel(run, title, metrics, width=each, height=lines)
        for run, title in zip(runs, titles, strict=True)
    ]
    return Columns(panels, width=each, padding=(0, 1, 0, 0)) if across > 1 else Group(*panels)


def _panel(
    run: Follower, title: str, metrics: Sequence[str], *, width: int, height: int
) -> RenderableType:
    if not any("/" in name for line in run.lines for name in line):
        return Panel("no metrics yet", title=Text(title), width=width)
    groups = [[name] for name in metrics] or _usual(run)
    columns = 2 if width >= 2 * _MIN_WIDTH else 1
    head = _head(run, max(1, height - _CHART - 2) if height else 99)
    fits = max(1, (height - head.row_count - 2) // _CHART) * columns if height else len(groups)
    charts = [_chart(run, names, width=(width - 5) // columns) for names in groups[:fits]]
    grid = Table.grid(*([""] * columns), padding=(0, 1, 0, 0))
    for at in range(0, len(charts), columns):
        grid.add_row(*charts[at : at + columns])
    return Panel(Group(head, grid), title=Text(title), width=width)


def _usual(run: Follower) -> list[list[str]]:
    names = list(dict.fromkeys(name for line in run.lines for name in line if "/" in name))
    losses: list[str] = [name for name in ("train/loss", "eval/loss") if name in names]
    metrics = [name for name in names if name.startswith("eval/") and name != "eval/loss"]
    rest = [
        one
        for one in ("train/grad_norm", "speed/tokens_per_second", "train/samples_per_second")
        if one in names
    ]
    return [losses, *([name] for name in [*metrics[:1], *rest[:2]])]


def _head(run: Follower, most: int) -> Table:
    """Return the newest values; ``most`` limits the rows, from the end of the metrics."""
    table = Table.grid(padding=(0, 2))
    last = {
        name: value
        for line in run.lines
        for name, value in line.items()
        if line.get("weights", "raw") == "raw"
    }
    events = [printable(line["event"]) for line in run.lines if "event" in line]
    table.add_row(
        "step", f"{last['step']:,}", Text(run.exit_reason or f"last line {run.age:,.0f} s ago")
    )
    values = [name for name in ("train/loss", "train/lr", *last) if name in last]
    values = [
        name
        for name in dict.fromkeys(values)
        if name.startswith(("train/loss", "train/lr", "eval/"))
    ]
    for name in values[: max(1, most - 4)]:
        table.add_row(Text(printable(name)), Text(_short(last[name])))
    shares = {
        name.partition("/")[2]: number(last[name]) for name in last if name.startswith("share/")
    }
    if shares:
        parts = sorted(shares.items(), key=lambda part: -part[1])[:3]
        table.add_row(
            "time, latest",
            Text(printable(", ".join(f"{100 * part:.0f} % {name}" for name, part in parts))),
        )
    if "train/samples_per_second" in last:
        table.add_row("speed, latest", f"{number(last['train/samples_per_second']):,.0f} samples/s")
    counts = {kind: events.count(kind) for kind in dict.fromkeys(events)}
    if counts:
        seen = " (in the sampled lines)" if run.sampled else ""
        table.add_row(
            "events", Text(", ".join(f"{kind}: {count}" for kind, count in counts.items()) + seen)
        )
    return table


def _chart(run: Follower, names: Sequence[str], *, width: int) -> RenderableType:
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name in names:
        for line in (line for line in run.lines if name in line):
            series.setdefault((name, line.get("weights", "raw")), []).append(
                (line["step"], number(line[name]))
            )
    named = [
        (name if w == "raw" else f"{name} ({w})", points) for (name, w), points in series.items()
    ]
    return chart(named, head="" if series else ", ".join(names), width=width, height=_CHART - 3)


def chart(
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]], *, head: str, width: int, height: int
) -> RenderableType:
    """Return a chart of curves (name, points of step and value; only finite values are drawn) below
    a legend."""
    legend, curves = Text(printable(head)), list[PlotCurve]()
    for (name, points), colour in zip(series, cycle(COLOURS), strict=False):
        if finite := [point for point in points if math.isfinite(point[1])]:
            steps, values = zip(*finite, strict=True)
            curves.append((steps, values, colour))
            legend.append(f"━ {printable(name)}  ", style=colour)
    if not curves:
        return Text(f"{printable(head)} no metrics", style="dim")
    legend.append("(by step)", style="dim")
    return Group(
        legend, Text.from_ansi("\n".join(plotted(curves, width=width - 16, height=height)))
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(value)
