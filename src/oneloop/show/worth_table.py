"""The gain of each technique: a table for the terminal and a page with bars."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from oneloop.show.report.page import assembled, chart_section, table

_HEAD = (
    "technique",
    "alone",
    "spread",
    "on top of the others",
    "spread",
    "memory",
    "weights after 8 steps",
)


def as_table(results: Mapping[str, Any]) -> Table:
    """Return the results of :func:`oneloop.plan.worth.measured` as a terminal table."""
    shown = Table(*_HEAD, show_edge=False, pad_edge=False)
    for row in _rows(results):
        shown.add_row(*row)
    return shown


def sentences(results: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table: the baseline, all techniques together, and the control."""
    none, whole, control = results["none"], results["all"], results["control"]
    rates = f"{none['median']:,.0f} samples/s ({none['min']:,.0f} to {none['max']:,.0f})"
    how = f"{results['steps']} steps a run, {results['rounds']} rounds"
    failed = f"; of these runs some failed: {whole['fault']}" if whole["fault"] else ""
    return [
        f"without any of them: {rates}, peak {none['peak']:,.0f} MiB; {how}",
        (
            f"with all of them: {_ratio(whole)} ({_spread(whole)}), peak {whole['peak']:,.0f} "
            f"MiB{failed}"
        ),
        (
            f"control (two runs without techniques): {_ratio(control)} ({_spread(control)}); "
            "smaller gains are noise"
        ),
    ]


def as_page(results: Mapping[str, Any]) -> str:
    """Return an HTML page with bars, their spread, and the table."""
    title = f"Gain of each technique: {results['recipe']}"
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = [*sentences(results), f"{results['date']}, {machine}"]
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in lines)]
    chart, rows = _bars(results), table(_HEAD, list(_rows(results)))
    body += [chart_section(0, chart), f"<section><h2>Metrics</h2>{rows}</section>"]
    return assembled(title, body, [chart])


def _rows(results: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    rows = []
    for one in results["techniques"]:
        if "alone" not in one:
            rows.append((one["name"], "", "", "", "", "", one["fault"]))
            continue
        alone, on_top = one["alone"], one["on top"]
        memory = f"{alone['memory']:+,.0f} MiB"
        result = one["result"] + (f"; {one['fault']}" if one["fault"] else "")
        rows.append(
            (
                one["name"],
                _ratio(alone),
                _spread(alone),
                _ratio(on_top),
                _spread(on_top),
                memory,
                result,
            )
        )
    return rows


def _ratio(metric: Mapping[str, float]) -> str:
    return "n/a" if math.isnan(metric["median"]) else f"{metric['median']:.2f}x"


def _spread(metric: Mapping[str, float]) -> str:
    return "" if math.isnan(metric["median"]) else f"{metric['min']:.2f} to {metric['max']:.2f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _bars(results: Mapping[str, Any]) -> dict[str, Any]:
    tried = [
        one
        for one in results["techniques"]
        if "alone" in one and not math.isnan(one["alone"]["median"])
    ]
    data = []
    for kind, name, colour in (
        ("alone", "alone", "#2f6fde"),
        ("on top", "on top of the others", "#d9622b"),
    ):
        metrics = [one[kind] for one in tried]
        above = [_number(each["max"] - each["median"]) for each in metrics]
        below = [_number(each["median"] - each["min"]) for each in metrics]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [one["name"] for one in tried],
                "y": [_number(each["median"]) for each in metrics],
                "marker": {"color": colour},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": above,
                    "arrayminus": below,
                },
            }
        )
    one = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": 1,
        "y1": 1,
        "line": {"dash": "dot"},
    }
    axes = {
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": "throughput with / without"}},
    }
    legend = {"legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}, "showlegend": True}
    layout = {
        "margin": {"l": 55, "r": 15, "t": 40, "b": 60},
        "height": 380,
        "barmode": "group",
        "shapes": [one],
    }
    layout |= axes | legend
    return {
        "title": "Throughput with each technique, relative to without",
        "data": data,
        "layout": layout,
    }
