"""One page about a run, or about several: self-contained HTML, from what the run folders hold.

>>> Path("report.html").write_text(report([Path("runs/digits")]))

Curves are drawn by plotly, whose code is in the page: nothing is fetched. Colours follow the reader's light or dark theme;
every chart has its figures as a table beside it, for screen readers and for copying.
"""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

_COLOURS = ("#2f6fde", "#d9622b", "#2a9d6f", "#a04fc4", "#c43b5c", "#7a7a2a", "#3a9fb8", "#8a5a3c")
_MARKS = {"resume": "triangle-up", "save": "square", "skip": "x", "rewind": "triangle-left", "stop": "octagon"}
_SHARES = ("compute", "data", "update", "evaluate", "save", "other")
_TABLE_ROWS = 200


@dataclass(frozen=True)
class Run:
    """What a run folder tells."""

    name: str
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    recipe: dict[str, Any]
    environment: dict[str, Any]

    def curve(self, figure: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Steps and values of one figure; of an evaluation, with these weights."""
        found = [(line["step"], _number(line[figure])) for line in self.lines
                 if figure in line and "event" not in line and (weights is None or line.get("weights") == weights)]  # fmt: skip
        return [step for step, _ in found], [value for _, value in found]

    def figures(self) -> list[str]:
        return list(dict.fromkeys(name for line in self.lines for name in line if "/" in name))

    def weights(self) -> list[str]:
        return list(dict.fromkeys(line["weights"] for line in self.lines if "weights" in line))

    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "event" in line]


def read_run(folder: Path) -> Run:
    """Reads a run folder; a run that is not finished has no summary.

    Raises:
        ValueError: it holds no metrics.jsonl.
    """
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError as error:
        raise ValueError(f"{folder} holds no run (metrics.jsonl: {error.strerror})") from error
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def content(name: str) -> dict[str, Any]:
        try:
            return dict(yaml.safe_load((folder / name).read_text()) or {})
        except (OSError, yaml.YAMLError):
            return {}

    return Run(
        folder.resolve().name, lines, content("summary.json"), content("recipe.yaml"), content("environment.json")
    )


def report(folders: Sequence[Path]) -> str:
    """The page, of one run or of several laid over one another.

    Raises:
        ValueError: a folder holds no run.
    """
    runs = _distinct([read_run(folder) for folder in folders])
    charts = [chart for chart in _charts(runs) if chart["data"]]
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    body = [f"<h1>{_safe(title)}</h1>", *(_headline(run, several=len(runs) > 1) for run in runs)]
    if len(runs) > 1:
        body.append(_differences(runs))
    body += [_figure(number, chart) for number, chart in enumerate(charts)]
    body += [_events(run) for run in runs]
    body += [_about(run, several=len(runs) > 1) for run in runs]
    drawn = json.dumps([{"data": chart["data"], "layout": chart["layout"]} for chart in charts], allow_nan=False)
    return _PAGE.format(title=_safe(title), style=_STYLE, body="\n".join(body), plotly=_plotly(),
                        charts=drawn.replace("</", "<\\/"), script=_SCRIPT)  # fmt: skip


def _plotly() -> str:
    """The library's code as its package brings it; importing the package would take a second for nothing."""
    package = find_spec("plotly")
    assert package is not None and package.submodule_search_locations
    return (Path(package.submodule_search_locations[0]) / "package_data" / "plotly.min.js").read_text()


# --- charts ---------------------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run]) -> Iterable[dict[str, Any]]:
    def some(*figures: str) -> list[dict[str, Any]]:
        return [trace for run in runs for figure in figures for trace in _traces(run, figure, runs)]

    evaluated = [name for run in runs for name in run.figures() if name.startswith("eval/")]
    yield _chart(
        "Loss", [*some("train/loss"), *some("eval/loss"), *_event_marks(runs)], log=_positive(runs, "train/loss")
    )
    for name in dict.fromkeys(evaluated):
        if name != "eval/loss":
            yield _chart(name.removeprefix("eval/").replace("_", " ").capitalize(), some(name))
    yield _chart("Learning rate", some("train/lr"))
    yield _chart("Gradient norm", some("train/grad_norm"), log=_positive(runs, "train/grad_norm"))
    yield _chart("Update against weights (about 1e-3 is usual)", some("train/update_ratio"),
                 log=_positive(runs, "train/update_ratio"))  # fmt: skip
    yield _chart("Gradient noise scale, in samples", some("train/noise_scale"))
    yield _chart("Samples per second", some("train/samples_per_second"))
    yield _chart("Tokens per second", some("speed/tokens_per_second"))
    yield _chart("Share of the device's peak (MFU)", some("speed/mfu"))
    for run in runs:
        shares = [{**trace, "stackgroup": "one", "mode": "lines", "name": share}
                  for share in _SHARES for trace in _traces(run, f"share/{share}", [run])]  # fmt: skip
        for trace, colour in zip(shares, _COLOURS, strict=False):
            trace["line"] = {"color": colour, "width": 0}
        yield _chart(f"Where the time goes{f': {run.name}' if len(runs) > 1 else ''}", shares)
    yield _chart("Peak memory of a process, in GiB", some("memory/peak_gib"))


def _traces(run: Run, figure: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    found = []
    evaluation = not figure.startswith(("train/", "speed/", "share/", "memory/"))
    for weights in run.weights() if evaluation else [None]:
        steps, values = run.curve(figure, weights)
        if not steps:
            continue
        what = figure if evaluation else figure.partition("/")[2]
        words = [run.name if len(runs) > 1 else "", what, f"({weights})" if weights not in (None, "raw") else ""]
        colour = _COLOURS[runs.index(run) % len(_COLOURS)] if len(runs) > 1 else (
            _COLOURS[0] if not evaluation else _COLOURS[1 + run.weights().index(weights or "raw") % 7])  # fmt: skip
        dash = "solid" if not evaluation else "dot" if weights == "raw" else "dash"
        found.append({"type": "scatter", "x": steps, "y": [value if math.isfinite(value) else None for value in values],
                      "mode": "lines+markers" if len(steps) < 40 else "lines", "name": " ".join(filter(None, words)),
                      "line": {"color": colour, "dash": dash}})  # fmt: skip
    return found


def _event_marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row of marks per kind of event, at the height of the training loss then."""
    found = []
    for run in runs:
        steps, losses = run.curve("train/loss")
        for kind, symbol in _MARKS.items():
            at = [event["step"] for event in run.events() if event["event"] == kind]
            heights = [
                min(zip(steps, losses, strict=True), key=lambda p: abs(p[0] - step))[1] if steps else 0.0 for step in at
            ]
            if at:
                name = kind if len(runs) == 1 else f"{run.name} {kind}"
                found.append({"type": "scatter", "x": at, "y": heights, "mode": "markers", "name": name,
                              "marker": {"symbol": symbol, "size": 9, "color": "#888",
                                         "line": {"width": 1, "color": "#444"}}})  # fmt: skip
    return found


def _positive(runs: Sequence[Run], figure: str) -> bool:
    values = [value for run in runs for value in run.curve(figure)[1] if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20


def _chart(title: str, data: list[dict[str, Any]], *, log: bool = False) -> dict[str, Any]:
    layout = {"margin": {"l": 55, "r": 15, "t": 40 if len(data) > 1 else 10, "b": 40}, "height": 320, "hovermode": "x unified",
              "xaxis": {"title": {"text": "step"}}, "yaxis": {"type": "log" if log else "linear"},
              "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}, "showlegend": len(data) > 1}  # fmt: skip
    return {"title": title, "data": data, "layout": layout}


def _figure(number: int, chart: Mapping[str, Any]) -> str:
    rows = [(trace.get("name") or chart["title"], x, y) for trace in chart["data"]
            for x, y in zip(trace["x"], trace["y"], strict=True)]  # fmt: skip
    kept = rows[:: max(1, math.ceil(len(rows) / _TABLE_ROWS))]
    more = f" (every {math.ceil(len(rows) / _TABLE_ROWS)}-th of {len(rows)})" if len(kept) < len(rows) else ""
    table = "".join(f"<tr><td>{_safe(name)}</td><td>{x}</td><td>{_short(y)}</td></tr>" for name, x, y in kept)
    title = _safe(chart["title"])
    return (f'<figure><figcaption><h2>{title}</h2></figcaption><div id="chart-{number}" class="chart" role="img"'
            f' aria-label="Chart: {title}. Its figures follow as a table."></div><details><summary>Figures{more}</summary>'
            f'<div class="wide"><table><thead><tr><th>curve</th><th>step</th><th>value</th></tr></thead><tbody>{table}'
            "</tbody></table></div></details></figure>")  # fmt: skip


# --- words and tables -----------------------------------------------------------------------------------------------


def _headline(run: Run, *, several: bool) -> str:
    summary = run.summary
    best = summary.get("best") or {}
    cards = [(name.partition("/")[2].replace("_", " ") + (" (test)" if name.startswith("test/") else ""), _short(value))
             for name, value in summary.items() if name.startswith(("eval/", "test/")) and isinstance(value, float)]  # fmt: skip
    if best.get("value") is not None:
        cards.append((f"best {best['metric'].partition('/')[2]}, at step {best['step']}", _short(best["value"])))
    cards += [(name, f"{summary[name]:,.0f}{unit}") for name, unit in (("step", ""), ("samples", ""), ("tokens", ""),
              ("seconds", " s")) if name in summary]  # fmt: skip
    shown = "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in cards)
    reason = summary.get("exit_reason", "not finished")
    said = "".join(f"<p>{_safe(summary[key])}</p>" for key in ("time", "noise_scale") if summary.get(key))
    head = f"<h2>{_safe(run.name)}</h2>" if several else ""
    return f'<section>{head}<p class="reason">{_safe(str(reason))}</p><dl class="cards">{shown}</dl>{said}</section>'


def _differences(runs: Sequence[Run]) -> str:
    flat = [_flat(run.recipe) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one)
            if len({json.dumps(one.get(key)) for one in flat}) > 1 and key != "run.dir"]  # fmt: skip
    head = "".join(f"<th>{_safe(run.name)}</th>" for run in runs)
    rows = "".join(f"<tr><th>{_safe(key)}</th>{''.join(f'<td>{_safe(str(one.get(key)))}</td>' for one in flat)}</tr>"
                   for key in keys)  # fmt: skip
    table = (
        f"<thead><tr><th>key</th>{head}</tr></thead><tbody>{rows}</tbody>"
        if keys
        else "<tbody><tr><td>nothing</td></tr></tbody>"
    )
    return f'<section><h2>What differs in their recipes</h2><div class="wide"><table>{table}</table></div></section>'


def _events(run: Run) -> str:
    if not run.events():
        return ""
    rows = "".join(f"<tr><td>{event['step']}</td><td>{_safe(event['event'])}</td><td>{_safe(str(event.get('why', '')))}</td>"
                   f"<td>{_safe(', '.join(map(str, event.get('ids', [])[:32])))}</td></tr>" for event in run.events())  # fmt: skip
    return (f"<section><details><summary>Events of {_safe(run.name)} ({len(run.events())})</summary><div class=\"wide\"><table>"
            f"<thead><tr><th>step</th><th>event</th><th>why</th><th>samples</th></tr></thead><tbody>{rows}</tbody></table></div>"
            "</details></section>")  # fmt: skip


def _about(run: Run, *, several: bool) -> str:
    environment = {key: value for key, value in run.environment.items() if key != "accelerate"}
    of = f" of {_safe(run.name)}" if several else ""
    repeat = _command(run.environment)
    launched = run.environment.get("accelerate") or {}
    return (f"<section><h2>To repeat it{of}</h2><pre><code>{_safe(repeat)}</code></pre>"
            f"<details><summary>Recipe{of}</summary><pre>{_safe(yaml.safe_dump(run.recipe, sort_keys=False))}</pre></details>"
            f"<details><summary>Environment{of}</summary><pre>{_safe(yaml.safe_dump({**environment, 'accelerate': launched}, sort_keys=False))}"
            "</pre></details></section>")  # fmt: skip


def _command(environment: Mapping[str, Any]) -> str:
    """What to type to repeat the run, on as many processes."""
    words = (environment.get("command") or [""])[1:]
    if environment.get("processes", 1) == 1:
        return shlex.join(["python", "-m", "oneloop.train", *words])
    sharded = (environment.get("accelerate") or {}).get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    config = f"accelerate_configs/{'fsdp2' if sharded else 'ddp'}.yaml"
    return shlex.join(["accelerate", "launch", "--config_file", config, "--num_processes", str(environment["processes"]),
                       "-m", "oneloop.train", *words])  # fmt: skip


def _distinct(runs: list[Run]) -> list[Run]:
    """Runs of one name get a number."""
    names = [run.name for run in runs]
    return [Run(f"{run.name} [{n + 1}]" if names.count(run.name) > 1 else run.name, run.lines, run.summary, run.recipe,
                run.environment) for n, run in enumerate(runs)]  # fmt: skip


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}.{key}" if key else group: value for group, inside in recipe.items()
            for key, value in (inside.items() if isinstance(inside, Mapping) else (("", inside),))}  # fmt: skip


def _number(value: Any) -> float:
    return float(value)  # NaN and Inf are written as text


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _safe(text: str) -> str:
    return html.escape(text)


_STYLE = """
:root { --ground: #ffffff; --ink: #1c2430; --soft: #5a6675; --line: #d9dee5; --card: #f4f6f9; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181d; --ink: #e6eaf0; --soft: #a3afbd; --line: #2f3842; --card: #1d232a; } }
* { box-sizing: border-box; }
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1180px;
  padding: 1rem; }
main { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
main > h1, main > section { grid-column: 1 / -1; margin: 0; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .8rem; min-width: 0; }
.chart { width: 100%; min-height: 320px; }
.reason { font-weight: 600; margin: 0 0 .6rem; } section p { margin: .4rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0; }
.cards div { background: var(--card); border-radius: 8px; padding: .5rem .9rem; }
dt { color: var(--soft); font-size: .82rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
.wide { overflow-x: auto; max-height: 24rem; } summary { cursor: pointer; color: var(--soft); padding: .25rem 0; }
summary:focus-visible, a:focus-visible { outline: 2px solid #2f6fde; }
pre { background: var(--card); border-radius: 8px; overflow-x: auto; padding: .8rem; font-size: .82rem; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 1rem; }
"""

_SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const ink = dark.matches ? "#e6eaf0" : "#1c2430", line = dark.matches ? "#2f3842" : "#d9dee5";
  const hover = dark.matches ? "#1d232a" : "#ffffff";
  return {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink, "hoverlabel.bgcolor": hover,
    "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line};
}
charts.forEach((chart, n) => Plotly.newPlot("chart-" + n, chart.data, chart.layout,
  {responsive: true, displaylogo: false, displayModeBar: false}).then(made => Plotly.relayout(made, colours())));
dark.addEventListener("change", () => document.querySelectorAll(".chart").forEach(one => Plotly.relayout(one, colours())));
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title} - oneloop</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#figures">To the figures</a>
<main id="figures">
{body}
</main>
<script>{plotly}</script>
<script type="application/json" id="charts">{charts}</script>
<script>{script}</script>
</body>
</html>
"""
