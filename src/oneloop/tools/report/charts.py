"""The charts of the report: plotly's traces and layouts as plain data, from records."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from oneloop.tools.run_reader import Record, number

_COLOURS = ("#2f6fde", "#d9622b", "#2a9d6f", "#a04fc4", "#c43b5c", "#8a8a2a", "#3a9fb8", "#8a5a3c")
_MARKS = {
    "resume": "triangle-up",
    "save": "square",
    "skip": "x",
    "rewind": "triangle-left",
    "stop": "octagon",
}
_TRAINING = ("train/", "speed/", "share/", "memory/", "device/")
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
    "device/utilisation": "Share of time the device was busy (NVML)",
    "memory/peak_gib": "Peak memory in GiB (on a GPU its own, else RAM)",
}


def charts(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return ``{"title", "data", "layout"}`` of every chart that has data.

    ``data`` holds plotly's traces, and ``layout`` is plotly's layout.
    """
    return [chart for chart in _all(runs) if chart["data"]]


def _all(runs: Sequence[Record]) -> Iterable[dict[str, Any]]:
    def traces_of(*metrics: str) -> list[dict[str, Any]]:
        traces = []
        for run in runs:
            for metric in metrics:
                traces += _traces(run, metric, runs)
        return traces

    names = dict.fromkeys(name for run in runs for name in run.metrics())

    yield _chart(
        "Loss (train: mean since the previous point)",
        [*traces_of("train/loss"), *traces_of("eval/loss")],
        log=_is_logarithmic(runs, "train/loss"),
        marks=_event_marks(runs),
    )

    # The task's own metrics: in training, in evaluations, and others.
    for name in names:
        if name.startswith("train/") and name not in ("train/loss", "train/epoch", *_SINGLE):
            title = name.removeprefix("train/").replace("_", " ")
            yield _chart(f"In training: {title}", traces_of(name))
    for name in names:
        if name.startswith("eval/") and name != "eval/loss":
            title = name.removeprefix("eval/").replace("_", " ").capitalize()
            yield _chart(title, traces_of(name))
    for name in names:
        if not name.startswith((*_TRAINING, "eval/", "test/", "profile/")):
            title = name.replace("/", ": ").replace("_", " ").capitalize()
            yield _chart(title, traces_of(name))

    # The metrics that every run has. A constant learning rate is in the headline.
    for metric, title in _SINGLE.items():
        if metric != "train/lr" or any(constant(run, metric) is None for run in runs):
            yield _chart(title, traces_of(metric), log=_is_logarithmic(runs, metric))
        if metric == "speed/mfu":
            for run in runs:
                yield _shares(run, several=len(runs) > 1)

    for run in runs:
        confusion = matrix_of(run.examples.get("confusion"))
        if confusion:
            yield _confusion(confusion, f": {run.name}" if len(runs) > 1 else "")


def constant(run: Record, metric: str) -> float | None:
    """Return the value of a metric that never changes in a run; None for others."""
    values = set(run.curve(metric)[1])
    return values.pop() if len(values) == 1 else None


def _shares(run: Record, *, several: bool) -> dict[str, Any]:
    """Return stacked areas of the phases' shares of the time."""
    stacked = []
    phases = [name.removeprefix("share/") for name in run.metrics() if name.startswith("share/")]
    for phase, colour in zip(phases, _COLOURS, strict=False):
        for trace in _traces(run, f"share/{phase}", [run]):
            if not any(trace["y"]):
                continue
            trace["stackgroup"] = "one"
            trace["mode"] = "lines"
            trace["name"] = phase
            trace["line"] = {"color": colour, "width": 0}
            trace["fillcolor"] = colour
            for axis in "xy":
                trace[axis] = averaged(trace[axis])
            stacked.append(trace)
    of = f": {run.name}" if several else ""
    return _chart(f"Shares of the time between log lines{of}", stacked)


def averaged(values: Sequence[float | None], most: int = 60) -> list[float | None]:
    """Return the means of stretches of the values, so that an area can be read.

    Args:
        values: None: no value.
        most: largest number of stretches.

    Returns:
        A mean for each stretch; None if it has no value.
    """
    length = max(1, -(-len(values) // most))
    means: list[float | None] = []
    for start in range(0, len(values), length):
        stretch = [value for value in values[start : start + length] if value is not None]
        means.append(sum(stretch) / len(stretch) if stretch else None)
    return means


def _traces(run: Record, metric: str, runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a curve of a metric for each of the evaluated weights of a run."""
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
        if len(runs) > 1:
            words = [run.name, *words]
        if weights not in (None, "raw"):
            words.append(f"({weights})")

        # The colour is the run's; of a single run, it is the weights'.
        number = 0
        if len(runs) > 1:
            number = runs.index(run)
        elif weights:
            number = 1 + run.weights().index(weights)
        dash = "solid"
        if weights is not None:
            dash = "dot" if weights == "raw" else "dash"

        trace = {
            "type": "scatter",
            "x": steps,
            "y": [value if math.isfinite(value) else None for value in values],
            "mode": "lines+markers" if evaluation or len(steps) < 40 else "lines",
            "name": " ".join(filter(None, words)),
            "line": {"color": _COLOURS[number % len(_COLOURS)], "dash": dash},
        }
        traces.append(trace)
    return traces


def _event_marks(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one trace of markers per kind of event, each kind in a row below the chart."""
    traces = []
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)] if len(runs) > 1 else "#999"
        for kind, symbol in _MARKS.items():
            events = [event for event in run.events() if event["event"] == kind]
            if not events:
                continue
            # The second y axis has a row for each kind.
            marker = {
                "symbol": symbol,
                "size": 8,
                "color": colour,
                "line": {"width": 1, "color": "#555"},
            }
            trace = {
                "type": "scatter",
                "x": [event["step"] for event in events],
                "y": [kind] * len(events),
                "yaxis": "y2",
                "showlegend": False,
                "mode": "markers",
                "name": kind if len(runs) == 1 else f"{run.name} {kind}",
                "text": [str(event.get("why", "")) for event in events],
                "marker": marker,
            }
            traces.append(trace)
    return traces


def matrix_of(confusion: Any) -> dict[str, Any] | None:
    """Return a confusion matrix, or None if the content is invalid.

    Args:
        confusion: ``classes``, the names, and ``counts``, a row of numbers for each true class.
    """
    if not isinstance(confusion, dict):
        return None
    classes = confusion.get("classes")
    counts = confusion.get("counts")
    if not isinstance(classes, list) or not isinstance(counts, list) or len(classes) != len(counts):
        return None
    rows = []
    for row in counts:
        if not isinstance(row, list) or len(row) != len(classes):
            return None
        numbers = list(map(number, row))
        if not all(map(math.isfinite, numbers)):
            return None
        rows.append(list(map(int, numbers)))
    return {"classes": list(map(str, classes)), "counts": rows}


def _confusion(confusion: dict[str, Any], of: str) -> dict[str, Any]:
    """Return a heat map of the shares of each true class, with the counts as text."""
    classes = confusion["classes"]
    counts = confusion["counts"]
    shares = []
    for row in counts:
        samples = max(1, sum(row))
        shares.append([count / samples for count in row])
    # Shade a cell by its share; show its count.
    trace = {
        "type": "heatmap",
        "x": classes,
        "y": classes,
        "z": shares,
        "customdata": counts,
        "name": "samples",
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "colorscale": [
            [0, "rgba(47,111,222,0.0)"],
            [0.02, "rgba(47,111,222,0.15)"],
            [1, "rgba(47,111,222,0.55)"],
        ],
        "hovertemplate": "label %{y}, prediction %{x}: %{customdata}<extra></extra>",
    }
    if len(classes) <= 20:
        trace["text"] = [[count or "" for count in row] for row in counts]
        trace["texttemplate"] = "%{text}"

    chart = _chart(f"Confusion of the validation set: rows are the true classes{of}", [trace])

    # Name classes on both axes, the first one at the top.
    layout = chart["layout"]
    layout["height"] = 420
    layout["hovermode"] = "closest"
    for axis, title in (("xaxis", "predicted"), ("yaxis", "true")):
        layout[axis] |= {"type": "category", "title": {"text": title}, "showgrid": False}
    layout["yaxis"]["autorange"] = "reversed"
    layout["showlegend"] = False
    return chart


def rows(chart: dict[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the metrics of a chart as a table: its header and its rows."""
    cells: list[tuple[Any, ...]] = []
    if chart["data"][0]["type"] == "heatmap":
        trace = chart["data"][0]
        for name, counts in zip(trace["y"], trace["customdata"], strict=True):
            for predicted, count in zip(trace["x"], counts, strict=True):
                if count:
                    cells.append((name, predicted, count))
        return ["true class", "predicted", "samples"], cells
    for trace in chart["data"]:
        for x, y in zip(trace["x"], trace["y"], strict=True):
            cells.append((trace["name"], x, y))
    return ["curve", "step", "value"], cells


def _is_logarithmic(runs: Sequence[Record], metric: str) -> bool:
    """Return whether the axis is logarithmic.

    It is if all values are positive and span more than a factor of 20.
    """
    if metric in ("train/lr", "speed/mfu"):
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
    marks: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a chart with oneloop's layout.

    Args:
        title: the title.
        data: the traces; without any, the chart is left out.
        log: whether the y axis is logarithmic.
        marks: traces of events, which are drawn below the others.
    """
    y_axis: dict[str, Any] = {"type": "linear", "tickformat": "~g"}
    if log:
        y_axis = {"type": "log", "title": {"text": "logarithmic"}, "exponentformat": "power"}
    y_axis["automargin"] = True
    x_axis: dict[str, Any] = {"title": {"text": "step"}, "rangemode": "tozero"}
    layout: dict[str, Any] = {
        "margin": {"l": 55, "r": 15, "t": 40, "b": 40},
        "height": 320,
        "hovermode": "x unified",
        "xaxis": x_axis,
        "yaxis": y_axis,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
    }
    if not data:
        return {"title": title, "data": [], "layout": layout}

    # Make short and constant curves readable.
    if data[0]["type"] == "scatter":
        points, last = max((len(trace["x"]), max(trace["x"])) for trace in data)
        if last < 8:
            x_axis["dtick"] = 1
        if points < 3:
            title += f" ({points} point{'s' * (points > 1)})"
        values = set[Any]()
        for trace in data:
            values.update(value for value in trace["y"] if value is not None)
        if len(values) == 1:
            value = values.pop()
            margin = 0.1 * abs(value or 10)
            y_axis["range"] = [value - margin, value + margin]

    # Give each kind of event a row below the curves.
    if marks:
        kinds = len({mark["y"][0] for mark in marks})
        share = 0.07 * kinds
        y_axis["domain"] = [share + 0.05, 1]
        x_axis["anchor"] = "y2"
        layout["yaxis2"] = {
            "type": "category",
            "domain": [0, share],
            "showgrid": False,
            "fixedrange": True,
        }
        layout["height"] += 20 * kinds
    return {"title": title, "data": [*data, *marks], "layout": layout}
