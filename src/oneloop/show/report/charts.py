"""The charts of the report: plotly's traces and layouts as plain data, from records."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from oneloop.show.run_reader import Record, number

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
    """Return ``{"title", "data", "layout"}`` of every chart that has data."""
    return [chart for chart in _all(runs) if chart["data"]]


def _all(runs: Sequence[Record]) -> Iterable[dict[str, Any]]:
    def traces_of(*metrics: str) -> list[dict[str, Any]]:
        return [trace for run in runs for metric in metrics for trace in _traces(run, metric, runs)]

    losses = [*traces_of("train/loss"), *traces_of("eval/loss")]
    yield _chart(
        "Loss (train: mean since the previous point)",
        losses,
        log=_is_logarithmic(runs, "train/loss"),
        marks=_event_marks(runs),
    )
    evaluated = dict.fromkeys(
        name for run in runs for name in run.metrics() if name.startswith("eval/")
    )
    own = dict.fromkeys(name for run in runs for name in run.metrics() if name.startswith("train/"))
    for name in own:
        if name not in ("train/loss", "train/epoch", *_SINGLE):
            yield _chart(
                f"In training: {name.removeprefix('train/').replace('_', ' ')}", traces_of(name)
            )
    for name in evaluated:
        if name != "eval/loss":
            yield _chart(name.removeprefix("eval/").replace("_", " ").capitalize(), traces_of(name))
    known = (*_TRAINING, "eval/", "test/", "profile/")
    for name in dict.fromkeys(
        name for run in runs for name in run.metrics() if not name.startswith(known)
    ):
        yield _chart(name.replace("/", ": ").replace("_", " ").capitalize(), traces_of(name))
    for metric, title in _SINGLE.items():
        if metric != "train/lr" or any(constant(run, metric) is None for run in runs):
            yield _chart(title, traces_of(metric), log=_is_logarithmic(runs, metric))
        if metric == "speed/mfu":
            yield from (_shares(run, several=len(runs) > 1) for run in runs)
    for run in runs:
        if confusion := matrix_of(run.examples.get("confusion")):
            yield _confusion(confusion, f": {run.name}" if len(runs) > 1 else "")


def constant(run: Record, metric: str) -> float | None:
    """Return the value of a metric that never changes in a run; None for others."""
    values = set(run.curve(metric)[1])
    return values.pop() if len(values) == 1 else None


def _shares(run: Record, *, several: bool) -> dict[str, Any]:
    stacked = []
    phases = [name.removeprefix("share/") for name in run.metrics() if name.startswith("share/")]
    for phase, colour in zip(phases, _COLOURS, strict=False):
        stacked += [
            trace
            | {
                "stackgroup": "one",
                "mode": "lines",
                "name": phase,
                "line": {"color": colour, "width": 0},
            }
            | {"fillcolor": colour}
            | {axis: averaged(trace[axis]) for axis in "xy"}
            for trace in _traces(run, f"share/{phase}", [run])
            if any(trace["y"])
        ]
    return _chart(
        f"Shares of the time between log lines{f': {run.name}' if several else ''}", stacked
    )


def averaged(values: Sequence[float | None], most: int = 60) -> list[float | None]:
    """Return the means of at most ``most`` stretches of the values, so that an area can be read.
    None: no value."""
    starts = range(0, len(values), max(1, -(-len(values) // most)))
    stretches = (
        [value for value in values[at : at + starts.step] if value is not None] for at in starts
    )
    return [sum(stretch) / len(stretch) if stretch else None for stretch in stretches]


def _traces(run: Record, metric: str, runs: Sequence[Record]) -> list[dict[str, Any]]:
    traces = []
    evaluation = not metric.startswith(_TRAINING)
    for weights in run.weights() if evaluation else [None]:
        steps, values = run.curve(metric, weights)
        if not steps:
            continue
        label = metric if evaluation or metric == "train/loss" else metric.partition("/")[2]
        words = [
            run.name if len(runs) > 1 else "",
            label,
            f"({weights})" if weights not in (None, "raw") else "",
        ]
        number = (
            runs.index(run) if len(runs) > 1 else 1 + run.weights().index(weights) if weights else 0
        )
        dash = "solid" if weights is None else "dot" if weights == "raw" else "dash"
        traces.append(
            {
                "type": "scatter",
                "x": steps,
                "y": [value if math.isfinite(value) else None for value in values],
                "mode": "lines+markers" if evaluation or len(steps) < 40 else "lines",
                "name": " ".join(filter(None, words)),
                "line": {"color": _COLOURS[number % len(_COLOURS)], "dash": dash},
            }
        )
    return traces


def _event_marks(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one trace of markers per kind of event, each kind in a row below the chart."""
    traces = []
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)] if len(runs) > 1 else "#999"
        for kind, symbol in _MARKS.items():
            if events := [event for event in run.events() if event["event"] == kind]:
                traces.append(
                    {
                        "type": "scatter",
                        "x": [event["step"] for event in events],
                        "y": [kind] * len(events),
                        "yaxis": "y2",
                        "showlegend": False,
                        "mode": "markers",
                        "name": kind if len(runs) == 1 else f"{run.name} {kind}",
                        "text": [str(event.get("why", "")) for event in events],
                        "marker": {
                            "symbol": symbol,
                            "size": 8,
                            "color": colour,
                            "line": {"width": 1, "color": "#555"},
                        },
                    }
                )
    return traces


def matrix_of(confusion: Any) -> dict[str, Any] | None:
    """Return a confusion matrix, or None if the content is invalid."""
    if not isinstance(confusion, dict):
        return None
    classes, counts = confusion.get("classes"), confusion.get("counts")
    if not isinstance(classes, list) or not isinstance(counts, list) or len(classes) != len(counts):
        return None
    if any(not isinstance(row, list) or len(row) != len(classes) for row in counts):
        return None
    numbers = [[number(count) for count in row] for row in counts]
    if not all(math.isfinite(count) for row in numbers for count in row):
        return None
    return {
        "classes": [str(name) for name in classes],
        "counts": [[int(count) for count in row] for row in numbers],
    }


def _confusion(confusion: dict[str, Any], of: str) -> dict[str, Any]:
    classes, counts = confusion["classes"], confusion["counts"]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    trace = {
        "type": "heatmap",
        "x": classes,
        "y": classes,
        "z": shares,
        "customdata": counts,
        "name": "samples",
    }
    trace |= {"zmin": 0, "zmax": 1, "showscale": False, "xgap": 1, "ygap": 1}
    trace |= {
        "colorscale": [
            [at, f"rgba(47,111,222,{o})"] for at, o in ((0, 0.0), (0.02, 0.15), (1, 0.55))
        ]
    }
    trace |= {"hovertemplate": "label %{y}, prediction %{x}: %{customdata}<extra></extra>"}
    if len(classes) <= 20:
        trace |= {
            "text": [[count or "" for count in row] for row in counts],
            "texttemplate": "%{text}",
        }
    chart = _chart(f"Confusion of the validation set: rows are the true classes{of}", [trace])
    chart["layout"] |= {"height": 420, "hovermode": "closest"}
    for axis, title in (("xaxis", "predicted"), ("yaxis", "true")):
        chart["layout"][axis] |= {"type": "category", "title": {"text": title}, "showgrid": False}
    chart["layout"]["yaxis"] |= {"autorange": "reversed"}
    chart["layout"]["showlegend"] = False
    return chart


def rows(chart: dict[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the metrics of a chart as a table: its header and its rows."""
    if chart["data"][0]["type"] == "heatmap":
        trace = chart["data"][0]
        cells = [
            (trace["y"][row], trace["x"][column], count)
            for row, counts in enumerate(trace["customdata"])
            for column, count in enumerate(counts)
            if count
        ]
        return ["true class", "predicted", "samples"], cells
    return ["curve", "step", "value"], [
        (trace["name"], x, y)
        for trace in chart["data"]
        for x, y in zip(trace["x"], trace["y"], strict=True)
    ]


def _is_logarithmic(runs: Sequence[Record], metric: str) -> bool:
    """Return whether the axis is logarithmic: all values are positive and span more than a factor
    of 20."""
    values = [value for run in runs for value in run.curve(metric)[1] if math.isfinite(value)]
    return (
        metric not in ("train/lr", "speed/mfu")
        and bool(values)
        and min(values) > 0
        and max(values) / min(values) > 20
    )


def _chart(
    title: str,
    data: list[dict[str, Any]],
    *,
    log: bool = False,
    marks: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "margin": {"l": 55, "r": 15, "t": 40, "b": 40},
        "height": 320,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {"type": "log", "title": {"text": "logarithmic"}, "exponentformat": "power"}
        if log
        else {"type": "linear", "tickformat": "~g"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
    }
    layout["yaxis"]["automargin"] = True
    if data and data[0]["type"] == "scatter":
        points, last = max((len(trace["x"]), max(trace["x"])) for trace in data)
        layout["xaxis"] |= {"dtick": 1} if last < 8 else {}
        title += f" ({points} point{'s' * (points > 1)})" if points < 3 else ""
        values = {value for trace in data for value in trace["y"] if value is not None}
        if len(values) == 1:  # an axis around the only value
            value = values.pop()
            layout["yaxis"] |= {
                "range": [value - 0.1 * abs(value or 10), value + 0.1 * abs(value or 10)]
            }
    if data and marks:
        share = 0.07 * len({mark["y"][0] for mark in marks})
        layout["yaxis"]["domain"], layout["xaxis"]["anchor"] = [share + 0.05, 1], "y2"
        layout["yaxis2"] = {
            "type": "category",
            "domain": [0, share],
            "showgrid": False,
            "fixedrange": True,
        }
        layout["height"] += 20 * len({mark["y"][0] for mark in marks})
    return {"title": title, "data": [*data, *marks] if data else [], "layout": layout}
