"""Charts of curves for a terminal, of text."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import plotille
from rich.console import Group, RenderableType
from rich.text import Text

from oneloop.basics.files import printable

_LABEL = 10  # columns between two labels of plotille's x axis

COLOURS = (
    "bright_blue",
    "bright_yellow",
    "bright_green",
    "bright_magenta",
    "bright_cyan",
    "bright_red",
    "blue",
    "green",
)

PlotCurve = tuple[Sequence[float], Sequence[float], str | None]
"""steps, finite values (at least one), and a terminal colour"""


def plotted(curves: Sequence[PlotCurve], *, width: int, height: int) -> list[str]:
    """Return the lines of a chart of one or more curves.

    Args:
        curves: the curves; colours become terminal escape codes.
        width: characters of the area inside the axes.
        height: lines of this area.
    """
    low = min(min(values) for _, values, _ in curves)
    high = max(max(values) for _, values, _ in curves)
    span = high - low or max(abs(high) * 0.1, 1e-9)
    row = _round(span / (height - 1.5))  # between two labels
    bottom = row * math.floor(low / row)
    # The axis of a share ends at 1.
    top = bottom + row * (height - 1)
    if high <= 1 < top <= 1 + bottom:
        bottom -= top - 1

    figure: Any = plotille.Figure()
    figure.width = width
    figure.height = height
    figure.color_mode = "names"
    figure.with_colors = any(colour for *_, colour in curves)
    figure.x_label = figure.y_label = ""
    figure.origin = False  # it would be drawn in a curve's colour
    figure.x_ticks_fkt = lambda low, _: f"{low:,.0f}"
    # Label the middle of a line.
    figure.y_ticks_fkt = lambda low, _: f"{row * round(low / row + 0.5, 2) + 0.0:.4g}"
    for steps, values, colour in curves:
        draw = figure.plot if len(steps) > 1 else figure.scatter
        draw(steps, values, lc=colour, marker="•" if len(steps) <= 20 else None)

    last = max(1, *(steps[-1] for steps, _, _ in curves))
    column = max(1.0, _round(last / max(1, width // _LABEL)))
    figure.set_x_limits(0, column * width / _LABEL)
    figure.set_y_limits(bottom - row / 2, bottom + row * (height - 0.5))
    text = str(figure.show()).replace("-> ()", "").replace("\N{BRAILLE PATTERN BLANK}", " ")
    return text.splitlines()[2:]


_FACTORS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def _round(least: float) -> float:
    """Return the smallest round number that is not below ``least``.

    Round are one digit, 1.5 or 2.5, times a power of ten.
    """
    power = 10.0 ** math.floor(math.log10(least))
    rounded = (factor * power for factor in _FACTORS)
    return next(number for number in rounded if number >= least * (1 - 1e-9))


def chart(
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]],
    *,
    head: str,
    width: int,
    height: int,
) -> RenderableType:
    """Return a chart of curves below a legend. The n-th one has the n-th of :data:`COLOURS`.

    Args:
        series: name, and points of step and value; only finite values are drawn.
        head: text before the legend.
        width: columns, with the axis.
        height: lines inside the axes.
    """
    legend = Text(printable(head))
    curves: list[PlotCurve] = []
    for (name, points), colour in zip(series, cycle(COLOURS), strict=False):
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            steps, values = zip(*finite, strict=True)
            curves.append((steps, values, colour))
            legend.append(f"━ {printable(name)}  ", style=colour)
    if not curves:
        return Text(f"{printable(head)} no metrics", style="dim")
    legend.append("(by step)", style="dim")
    lines = plotted(curves, width=width - 16, height=height)
    return Group(legend, Text.from_ansi("\n".join(lines)))
