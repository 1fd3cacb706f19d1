"""The gain of each technique: a table for the terminal and a page with bars."""

import html
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from oneloop.tools.report.page import assembled, chart_section, table

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
    """Return the results of :func:`oneloop.tools.worth.worth.measured` as a terminal table."""
    shown = Table(*_HEAD, show_edge=False, pad_edge=False)
    for row in _rows(results):
        shown.add_row(*row)
    return shown


def sentences(results: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table: the baseline, all techniques together, and the control."""
    none = results["none"]
    whole = results["all"]
    control = results["control"]
    failed = f"; of these runs some failed: {whole['fault']}" if whole["fault"] else ""
    return [
        (
            f"without any of them: {none['median']:,.0f} samples/s ({none['min']:,.0f} to "
            f"{none['max']:,.0f}), peak {none['peak']:,.0f} MiB; {results['steps']} steps a run, "
            f"{results['rounds']} rounds"
        ),
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
    chart = _bars(results)
    rows = table(_HEAD, list(_rows(results)))
    body += [chart_section(0, chart), f"<section><h2>Metrics</h2>{rows}</section>"]
    return assembled(title, body, [chart])


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each technique; only the reason if it was not measured."""
    for one in results["techniques"]:
        if "alone" not in one:
            yield one["name"], "", "", "", "", "", one["fault"]
            continue
        alone = one["alone"]
        on_top = one["on top"]
        yield (
            one["name"],
            _ratio(alone),
            _spread(alone),
            _ratio(on_top),
            _spread(on_top),
            f"{alone['memory']:+,.0f} MiB",
            f"{one['result']}; {one['fault']}" if one["fault"] else one["result"],
        )


def _ratio(metric: Mapping[str, float]) -> str:
    return "n/a" if math.isnan(metric["median"]) else f"{metric['median']:.2f}x"


def _spread(metric: Mapping[str, float]) -> str:
    return "" if math.isnan(metric["median"]) else f"{metric['min']:.2f} to {metric['max']:.2f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _bars(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bar chart of the gains, alone and on top of the others."""
    tried = []
    for one in results["techniques"]:
        if "alone" in one and not math.isnan(one["alone"]["median"]):
            tried.append(one)
    return {
        "title": "Throughput with each technique, relative to without",
        "data": [
            _trace(tried, "alone", name="alone", colour="#2f6fde"),
            _trace(tried, "on top", name="on top of the others", colour="#d9622b"),
        ],
        "layout": {
            "margin": {"l": 55, "r": 15, "t": 40, "b": 60},
            "height": 380,
            "barmode": "group",
            "shapes": [_LINE_AT_ONE],
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "throughput with / without"}},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
            "showlegend": True,
        },
    }


_LINE_AT_ONE = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": 1,
    "y1": 1,
    "line": {"dash": "dot"},
}


def _trace(tried: list[Any], kind: str, *, name: str, colour: str) -> dict[str, Any]:
    """Return the bars of one kind, with their spread."""
    metrics = [one[kind] for one in tried]
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [_number(each["max"] - each["median"]) for each in metrics],
        "arrayminus": [_number(each["median"] - each["min"]) for each in metrics],
    }
    return {
        "type": "bar",
        "name": name,
        "x": [one["name"] for one in tried],
        "y": [_number(each["median"]) for each in metrics],
        "marker": {"color": colour},
        "error_y": spread,
    }
