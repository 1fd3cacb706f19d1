"""Curves drawn in letters, for a terminal or a page of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotille

Drawn = tuple[Sequence[float], Sequence[float], str | None]
"""steps, finite values (at least one), and a colour of the terminal"""


def plotted(curves: Sequence[Drawn], *, width: int, height: int) -> list[str]:
    """Return the lines of a chart of at least one curve; a curve with a colour gets the terminal's codes.

    ``width`` (in letters) and ``height`` (in lines) are those of the area inside the axes.
    """
    figure: Any = plotille.Figure()
    figure.width, figure.height = width, height
    figure.color_mode, figure.with_colors = "names", any(colour for *_, colour in curves)
    figure.x_label = figure.y_label = ""
    figure.x_ticks_fkt = lambda low, _: f"{low:,.0f}"
    figure.y_ticks_fkt = lambda low, _: f"{low:.4g}"
    for steps, values, colour in curves:
        draw = figure.plot if len(steps) > 1 else figure.scatter
        draw(steps, values, lc=colour)
    low = min(min(values) for _, values, _ in curves)
    high = max(max(values) for _, values, _ in curves)
    margin = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-9)
    figure.set_x_limits(0, 1.02 * max(1, *(steps[-1] for steps, _, _ in curves)))
    figure.set_y_limits(low - margin, high + margin)
    return [line.replace("-> ()", "") for line in figure.show().splitlines()[1:]]  # without the axes' names
