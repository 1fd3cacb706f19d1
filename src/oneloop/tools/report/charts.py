"""The charts of the report: plotly's traces and layouts as plain data, from records.

``charts.json`` has the parts of layouts and traces that all charts share.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from oneloop.tools.report.curve_groups import grouped
from oneloop.tools.report.matrices import classes_of, heat_map, matrices_of
from oneloop.tools.run_reader import Record

_STYLE = json.loads(Path(__file__).with_name("charts.json").read_text(encoding="utf-8"))
_COLOURS = ("#2f6fde", "#d9622b", "#2a9d6f", "#a04fc4", "#c43b5c", "#8a8a2a", "#3a9fb8", "#8a5a3c")
_MANY = 12  # curves of a chart, above which it has no legend
_TABLE_ROWS = 200  # of a chart, at most
_UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600))
_TRAINING = ("train/", "speed/", "share/", "memory/")
_SINGLE = {
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm, before clipping",
    "train/update_ratio": (
        "Update relative to weights (at the peak learning rate usually about 0.001)"
    ),
    "train/noise_scale": "Gradient noise scale, in samples",
    "train/samples_per_second": "Samples per second",
    "speed/tokens_per_second": "Tokens per second",
    "speed/mfu": "MFU: share of the device's peak FLOP/s (0 to 1)",
    "memory/peak_gib": "Peak memory in GiB (on a GPU its own, else RAM)",
}


def charts(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return every chart that has data.

    ``data`` holds plotly's traces, and ``layout`` is plotly's layout. ``meta`` of a trace has its
    positions on the other axes of :func:`axes`. ``head`` and ``lines`` are its table; ``sampled``
    says how many of the rows it has.
    """
    return [chart for chart in _all(runs) if chart["data"]]


def axes(runs: Sequence[Record]) -> dict[str, str]:
    """Return the quantities that charts may have on the x axis, and the titles of the axis."""
    found = {"step": "step"}
    if any(run.along["samples"].points for run in runs):
        found["samples"] = "samples trained on"
    if any(run.along["time"].points for run in runs):
        found["time"] = f"time in {_time_unit(runs)[0]}"
    return found


def _time_unit(runs: Sequence[Record]) -> tuple[str, int]:
    """Return the unit of time that suits the longest run, and its seconds."""
    longest = max((run.time for run in runs), default=0.0)
    return [unit for unit in _UNITS if longest >= 2 * unit[1] or unit[1] == 1][-1]


def _all(runs: Sequence[Record]) -> Iterator[dict[str, Any]]:
    curves = _Curves(runs)
    names = dict.fromkeys(name for run in runs for name in run.curves)
    yield curves.chart("Loss (train: mean since the previous point)", "train/loss", "eval/loss")

    # The task's own metrics: in evaluations, in training, and others.
    hidden = ("test/", "speed/", "share/", "memory/", "profile/")
    usual = ("eval/loss", "train/loss", "train/epoch", *_SINGLE)
    own = [name for name in names if not name.startswith(hidden) and name not in usual]
    own.sort(key=lambda name: (not name.startswith("eval/"), not name.startswith("train/")))
    yield from curves.groups(own)

    # The metrics that every run has. A constant learning rate is in the headline.
    for metric, title in _SINGLE.items():
        if metric != "train/lr" or any(constant(run, metric) is None for run in runs):
            yield curves.chart(title, metric)
        if metric == "speed/mfu":
            for run in runs:
                yield curves.shares(run)

    for run in runs:
        for name, table in matrices_of(run.examples).items():
            yield _matrix(name, table, curves.of(run))


def constant(run: Record, metric: str) -> float | None:
    """Return the value of a metric that never changes in a run; None for others."""
    values = set(run.curve(metric)[1])
    return values.pop() if len(values) == 1 else None


class _Curves:
    """Draws curves of runs.

    Args:
        runs: whose curves may be in the same charts.
    """

    def __init__(self, runs: Sequence[Record]) -> None:
        self._runs = runs
        self._several = len(runs) > 1
        self._second = _time_unit(runs)[1]

    def of(self, run: Record) -> str:
        """Return how the title of a chart of one run ends."""
        return f": {run.name}" if self._several else ""

    def chart(self, title: str, *metrics: str) -> dict[str, Any]:
        """Return a chart of metrics in all runs. The first one decides the scale."""
        traces = []
        for metric in metrics:
            for number, run in enumerate(self._runs):
                traces += self._traces(run, metric, colour=number if self._several else None)
        return _chart(title, traces, log=_is_logarithmic(self._runs, metrics[0]))

    def groups(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield charts of metrics; those that differ only in a class are in one chart per run."""
        classes = {name for run in self._runs for name in classes_of(run)}
        for measure, members in grouped(names, classes=classes).items():
            # The title says where the metric comes from, except for the validation set.
            split, _, name = measure.partition("/")
            other = measure.replace("/", ": ")
            words = {"eval": name, "train": f"In training: {name}"}.get(split, other)
            words = words.replace("_", " ")
            words = words[:1].upper() + words[1:]
            if len(members) == 1:
                chart = self.chart(words, *members)
                # The table of several runs has the last values of evaluations.
                points = max((len(trace["x"]) for trace in chart["data"]), default=0)
                if points > 1 or not self._several or not measure.startswith("eval/"):
                    yield chart
                continue
            for run in self._runs:
                traces = []
                for number, (name, label) in enumerate(members.items()):
                    traces += self._traces(run, name, colour=number, label=label)
                yield _chart(f"{words} of each class{self.of(run)}", traces)

    def shares(self, run: Record) -> dict[str, Any]:
        """Return a chart of stacked areas: the phases' shares of the time."""
        stacked = []
        names = [name for name in run.curves if name.startswith("share/")]
        for number, name in enumerate(names[: len(_COLOURS)]):
            for trace in self._traces(run, name, colour=number, label=name.removeprefix("share/")):
                if any(trace["y"]):
                    colour = trace["line"]["color"]
                    area = {
                        "stackgroup": "one",
                        "fillcolor": colour,
                        "line": {"color": colour, "width": 0},
                    }
                    stacked.append({**trace, **area, "mode": "lines"})
        return _chart(f"Shares of the time between log lines{self.of(run)}", stacked)

    def _traces(
        self, run: Record, metric: str, *, colour: int | None, label: str = ""
    ) -> list[dict[str, Any]]:
        """Return a curve of a metric for each of the evaluated weights of a run.

        Args:
            run: the run.
            metric: name of the metric.
            colour: number of the colour; None: that of the weights.
            label: name of the curve; empty: names of the run and of the metric.
        """
        traces = []
        evaluation = not metric.startswith(_TRAINING)
        for weights in run.weights() if evaluation else [None]:
            steps, values = run.curve(metric, weights)
            if not steps:
                continue
            # Name the curve by what differs: the run, the metric, the weights.
            words = [metric]
            if not evaluation and metric != "train/loss":
                words = [metric.partition("/")[2]]
            if self._several:
                words = [run.name, *words]
            if label:
                words = [label]
            if weights not in (None, "raw"):
                words.append(f"({weights})")

            # Curves of evaluations are dots (raw weights) or dashes (EMAs), if they must differ.
            number = colour
            if number is None:
                number = 1 + run.weights().index(weights) if weights else 0
            dash = {None: "solid", "raw": "dot"}.get(weights, "dash")
            if label and len(run.weights()) < 2:
                dash = "solid"

            # Positions of the steps on the other axes.
            positions: dict[str, Any] = {"step": steps}
            for axis, unit in (("samples", 1), ("time", self._second)):
                positions[axis] = [round(at / unit, 4) for at in run.position(axis, steps)]
            trace = {
                "type": "scatter",
                "x": steps,
                "y": [value if math.isfinite(value) else None for value in values],
                "meta": positions,
                "mode": "lines+markers" if evaluation or len(steps) < 40 else "lines",
                "name": escape(" ".join(filter(None, words))),
                "line": {"color": _COLOURS[number % len(_COLOURS)], "dash": dash},
            }
            traces.append(trace)
        return traces


def _matrix(name: str, table: dict[str, Any], of: str) -> dict[str, Any]:
    """Return a heat map of a matrix, with the first row at the top."""
    title, trace, titles = heat_map(name, table)
    chart = _chart(f"{title}{of}", [{**_STYLE["matrix"], **trace}])
    layout = chart["layout"]
    layout["height"] = min(900, max(280, 140 + 28 * len(table["rows"])))
    layout["hovermode"] = "closest"
    for axis, text in zip(("xaxis", "yaxis"), titles, strict=True):
        layout[axis] |= {**_STYLE["matrix_axis"], "title": {"text": text}}
    layout["yaxis"]["autorange"] = "reversed"
    layout["showlegend"] = False
    return chart


def _rows(data: Sequence[dict[str, Any]]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the metrics of a chart as a table: its header and its rows."""
    cells: list[tuple[Any, ...]] = []
    if data[0]["type"] == "heatmap":
        trace = data[0]
        for name, counts in zip(trace["y"], trace["customdata"], strict=True):
            for predicted, count in zip(trace["x"], counts, strict=True):
                if count:
                    cells.append((name, predicted, count))
        return ["row", "column", "samples"], cells
    for trace in data:
        for x, y in zip(trace["x"], trace["y"], strict=True):
            cells.append((trace["name"], x, y))
    return ["curve", "step", "value"], cells


def _is_logarithmic(runs: Sequence[Record], metric: str) -> bool:
    """Return whether the axis is logarithmic.

    It is if all values are positive and span more than a factor of 20.
    """
    if metric not in ("train/loss", *_SINGLE) or metric in ("train/lr", "speed/mfu"):
        return False
    values: list[float] = []
    for run in runs:
        values += filter(math.isfinite, run.curve(metric)[1])
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20


def _chart(
    title: str,
    data: list[dict[str, Any]],
    *,
    log: bool = False,
) -> dict[str, Any]:
    """Return a chart with oneloop's layout.

    Args:
        title: the title.
        data: the traces; without any, the chart is left out.
        log: whether the y axis is logarithmic.
    """
    if not data:
        return {"data": data}
    layout = copy.deepcopy(_STYLE["layout"])
    if log:
        layout["yaxis"] = dict(_STYLE["logarithmic"])
    if len(data) > _MANY:
        layout["showlegend"] = False
        layout["hovermode"] = "closest"

    # Make short and constant curves readable.
    if data[0]["type"] == "scatter":
        points, last = max((len(trace["x"]), max(trace["x"])) for trace in data)
        if last < 8:
            layout["xaxis"]["dtick"] = 1
        if points < 3:
            title += f" ({points} point{'s' * (points > 1)})"
        values = set[Any]()
        for trace in data:
            values.update(value for value in trace["y"] if value is not None)
        if len(values) == 1:
            value = values.pop()
            margin = 0.1 * abs(value or 10)
            layout["yaxis"]["range"] = [value - margin, value + margin]

    # The table has some of many rows.
    head, lines = _rows(data)
    every = max(1, math.ceil(len(lines) / _TABLE_ROWS))
    sampled = f" (1 of every {every} rows of {len(lines):,})" if every > 1 else ""
    return {
        "title": title,
        "data": data,
        "layout": layout,
        "head": head,
        "lines": lines[::every],
        "sampled": sampled,
    }
