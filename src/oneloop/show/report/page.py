"""Assemble the report page.

>>> Path("report.html").write_text(report([Path("runs/digits")]))

plotly draws the curves; its code is in the page, so that nothing is fetched. Colours follow the
reader's light or dark theme. Every chart also has its metrics as a table, for screen readers and
for copying.
"""

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.exit_codes import BadInput
from oneloop.show.report.charts import charts, constant, matrix_of, rows
from oneloop.show.report.example_pages import of_classes, sections
from oneloop.show.run_reader import EVENTS, Record, differences, distinct, number, read_record

_TABLE_ROWS = 200


def report(folders: Sequence[Path]) -> str:
    """Return the page of one run, or of several in the same charts. Raise ValueError if a folder
    holds no run."""
    runs = distinct([read_record(folder) for folder in folders])
    several = len(runs) > 1
    drawn = charts(runs)
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    body = [f"<h1>{_safe(title)}</h1>", *(_headline(run, several=several) for run in runs)]
    if several:
        changed = differences(runs)
        changes = (
            table(["key", *(run.name for run in runs)], changed) if changed else "<p>nothing</p>"
        )
        title = "Differences between the recipes"
        body.append(f"<section><h2>{title}</h2>{_region('Differences', changes)}</section>")
    body += [chart_section(number, chart) for number, chart in enumerate(drawn)]
    body += [_classes(run, several=several) for run in runs]
    for run in runs:
        body += sections(run.examples, of=f" in {run.name}" if several else "")
    body += [_events(run) for run in runs]
    body += [_about(run, several=several) for run in runs]
    return assembled(title, body, drawn)


def write_report(runs: Sequence[Path], to: Path | None) -> Path:
    """Write the page about runs, by default report.html in the only run's folder; return its path.
    Raise BadInput."""
    to = to or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        to.write_text(report(runs))
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"--to {to} cannot be written: {error.strerror}") from error
    return to


def assembled(title: str, body: Sequence[str], charts: Sequence[Mapping[str, Any]]) -> str:
    """Return a self-contained page of HTML sections and charts, which :func:`chart_section` has
    placed."""
    drawn = [{"data": _escaped(chart["data"]), "layout": chart["layout"]} for chart in charts]
    data = json.dumps(drawn, allow_nan=False)
    here = Path(__file__).parent
    page, style, script = ((here / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    package = find_spec("plotly")  # its JavaScript, without the import, which takes a second
    assert package is not None and package.submodule_search_locations
    plotly = (
        Path(package.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    ).read_text()
    # for the content security policy
    hashes = [hashlib.sha256(code.encode()) for code in (plotly, script)]
    return page.format(
        title=_safe(title),
        allowed=" ".join(f"'sha256-{base64.b64encode(one.digest()).decode()}'" for one in hashes),
        style=style,
        body="\n".join(filter(None, body)),
        plotly=plotly,
        charts=data.replace("<", "\\u003c"),
        script=script,
    )


def _escaped(value: Any, key: str = "") -> Any:
    """Escape a chart's names and texts, since plotly interprets some HTML in them."""
    if isinstance(value, str):
        return html.escape(value) if key in ("name", "text", "x", "y") else value
    if isinstance(value, Mapping):
        return {name: _escaped(inside, name) for name, inside in value.items()}
    return [_escaped(inside, key) for inside in value] if isinstance(value, list | tuple) else value


def chart_section(number: int, chart: dict[str, Any]) -> str:
    """Return the HTML of a chart's container and of its metrics as a table."""
    head, lines = rows(chart)
    every = math.ceil(len(lines) / _TABLE_ROWS)
    more = f" (1 of every {every} rows of {len(lines):,})" if every > 1 else ""
    title = _safe(chart["title"])
    return (
        f'<figure><figcaption><h2>{title}</h2></figcaption><div id="chart-{number}" '
        'class="chart" role="img"'
        f' aria-label="Chart: {title}. Its metrics follow as a '
        f'table."></div><details><summary>Table{more}</summary>'
        f"{_region(chart['title'], table(head, lines[:: max(1, every)]))}</details></figure>"
    )


def _headline(run: Record, *, several: bool) -> str:
    summary = run.summary
    best, final = (
        value if isinstance(value := summary.get(key), dict) else {} for key in ("best", "final")
    )
    cards = [
        (name.replace("/", " ").replace("_", " "), _short(value))
        for name, value in summary.items()
        if ("eval/" in name or "test/" in name) and isinstance(value, float)
    ]
    if best.get("value") is not None:
        metric = str(best.get("metric")).replace("/", " ") + " (raw)" * (len(run.weights()) > 1)
        cards.append((f"best {metric}, at step {best.get('step')}", _short(best["value"])))
    cards += [
        (
            name.replace("seconds", "time"),
            f"{number(summary[name]):,.0f}{' s' * (name == 'seconds')}",
        )
        for name in ("step", "samples", "tokens", "seconds")
        if name in summary
    ]
    if (rate := constant(run, "train/lr")) is not None:
        cards.append(("learning rate", _short(rate)))
    shown = "".join(
        f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in cards
    )
    reason = summary.get("exit_reason") or (
        f"at step {run.last:,}" if run.last is not None else "not begun"
    )
    if final and not summary.get("exit_code"):
        of = (
            f"{final.get('weights')}{' raw' * (len(run.weights()) > 1)} weights, of step "
            f"{final.get('step')}"
        )
        device = f", on {run.environment['device']}" if "device" in run.environment else ""
        reason = f"{reason}{device}; eval (validation) and test metrics: {of}"
    sentences = [
        text
        for key in ("time", "noise_scale")
        if (text := str(summary.get(key, ""))) and " n/a" not in text
    ]
    goodput = summary.get("goodput")
    sentences += [str(goodput.get("about"))] if isinstance(goodput, dict) else []
    sentences += [
        f"Communication that nothing overlapped took {100 * value:.1f} % of the profiled steps."
        for value in run.curve("profile/exposed_communication")[1][-1:]
    ]
    head = f"<h2>{_safe(run.name)}</h2>" if several else ""
    words = "".join(f"<p>{_safe(sentence)}</p>" for sentence in sentences)
    return (
        f'<section>{head}<p class="reason">{_safe(str(reason))}</p><dl '
        f'class="cards">{shown}</dl>{words}</section>'
    )


def _classes(run: Record, *, several: bool) -> str:
    confusion = matrix_of(run.examples.get("confusion"))
    if not confusion:
        return ""
    title, lines = f"Classes{f' of {run.name}' * several}", of_classes(confusion)
    shown = _region(title, table(["class", "samples", "precision", "recall", "F1"], lines))
    return f"<section><details><summary>{_safe(title)}</summary>{shown}</details></section>"


def _events(run: Record) -> str:
    events = run.events()
    if not events:
        return ""
    lines = [
        (
            event["step"],
            event["event"],
            event.get("why", ""),
            ", ".join(map(str, _list(event.get("ids"))[:32])),
        )
        for event in events
    ]
    kinds = [str(event["event"]) for event in events]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    title = f"Events of {run.name}: {counts}{', some of many' * (len(events) >= EVENTS)}"
    shown = _region("Events", table(["step", "event", "why", "samples"], lines))
    return f"<section><details><summary>{_safe(title)}</summary>{shown}</details></section>"


def _about(run: Record, *, several: bool) -> str:
    of = f" of {_safe(run.name)}" if several else ""
    recipe, environment = (
        yaml.safe_dump(part, sort_keys=False) for part in (run.recipe, run.environment)
    )
    return (
        f"<section><h2>To repeat it{of}</h2><pre "
        f'tabindex="0"><code>{_safe(_command(run.environment))}</code></pre>'
        f'<details><summary>Recipe{of}</summary><pre tabindex="0">{_safe(recipe)}</pre></details>'
        f"<details><summary>Environment{of}</summary><pre "
        f'tabindex="0">{_safe(environment)}</pre></details></section>'
    )


def _command(environment: Mapping[str, Any]) -> str:
    arguments = [str(word) for word in _list(environment.get("command"))[1:]]
    if "--run.dir" in arguments[:-1]:  # a finished run's folder rejects another run
        at = arguments.index("--run.dir") + 1
        arguments[at] = f"{arguments[at]}-again"
    else:
        arguments += ["--run.dir", "runs/again"]
    settings, processes = environment.get("accelerate"), environment.get("processes", 1)
    settings = (
        {name: str(value) for name, value in settings.items()} if isinstance(settings, dict) else {}
    )
    processes = processes if isinstance(processes, int) else 1
    precision = settings.get("ACCELERATE_MIXED_PRECISION", "no")
    sharded = settings.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    config = "fsdp2" if sharded else "ddp" if processes > 1 else "single"
    several = ["--num_processes", str(processes)] if processes > 1 else []
    mixed = ["--mixed_precision", precision] if precision != "no" else []
    return shlex.join(["oneloop", "launch", "--config_file", config, *several, *mixed, *arguments])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _region(name: str, table: str) -> str:
    return f'<div class="wide" role="region" aria-label="{_safe(name)}" tabindex="0">{table}</div>'


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table."""
    cells = "".join(f'<th scope="col">{_safe(title)}</th>' for title in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{_safe(_short(cell))}</td>' for cell in row)}</tr>" for row in lines
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _safe(text: str) -> str:
    return html.escape(text)
