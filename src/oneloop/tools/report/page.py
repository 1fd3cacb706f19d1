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
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.exit_codes import BadInput
from oneloop.tools.report.charts import charts, constant, matrix_of, rows
from oneloop.tools.report.example_pages import of_classes, sections
from oneloop.tools.run_reader import EVENTS, Record, differences, distinct, number, read_record

_TABLE_ROWS = 200


def report(folders: Sequence[Path]) -> str:
    """Return the page of one run, or of several in the same charts.

    Raises:
        ValueError: a folder holds no run.
    """
    runs = distinct([read_record(folder) for folder in folders])
    several = len(runs) > 1
    drawn = charts(runs)
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    body = [f"<h1>{_safe(title)}</h1>", *(_headline(run, several=several) for run in runs)]
    if several:
        title = "Differences between the recipes"
        changed = differences(runs)
        changes = "<p>nothing</p>"
        if changed:
            changes = table(["key", *(run.name for run in runs)], changed)
        body.append(f"<section><h2>{title}</h2>{_region('Differences', changes)}</section>")
    body += [chart_section(number, chart) for number, chart in enumerate(drawn)]
    body += [_classes(run, several=several) for run in runs]
    for run in runs:
        body += sections(run.examples, of=f" in {run.name}" if several else "")
    body += [_events(run) for run in runs]
    body += [_about(run, several=several) for run in runs]
    return assembled(title, body, drawn)


def write_report(runs: Sequence[Path], to: Path | None) -> Path:
    """Write the page about runs, and return its path.

    Args:
        runs: the run folders.
        to: the file; None: report.html in the only run's folder, or of several runs in the current
            one.

    Raises:
        BadInput: a folder holds no run, or the file cannot be written.
    """
    folder = runs[0] if len(runs) == 1 else Path()
    to = to or folder / "report.html"
    try:
        to.write_text(report(runs), encoding="utf-8")
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"--to {to} cannot be written: {error.strerror}") from error
    return to


def assembled(title: str, body: Sequence[str], charts: Sequence[Mapping[str, Any]]) -> str:
    """Return a self-contained page.

    Args:
        title: the title of the page.
        body: HTML sections, with one of :func:`chart_section` for each chart.
        charts: the charts, in the order of their numbers.
    """
    drawn = [{"data": _escaped(chart["data"]), "layout": chart["layout"]} for chart in charts]
    data = json.dumps(drawn, allow_nan=False)
    here = Path(__file__).parent
    page, style, script = (
        (here / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )

    # Read plotly's JavaScript without the import, which takes a second.
    package = find_spec("plotly")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0])
    plotly = (folder / "package_data" / "plotly.min.js").read_text(encoding="utf-8")

    # Allow these two scripts, and nothing else, by the content security policy.
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
    if isinstance(value, list | tuple):
        return [_escaped(inside, key) for inside in value]
    return value


def chart_section(number: int, chart: dict[str, Any]) -> str:
    """Return the HTML of a chart's container and of its metrics as a table.

    Args:
        number: index of the chart on the page.
        chart: its title, data and layout.
    """
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
    """Return the results of a run as cards, how it ended, and what oneloop says about its speed."""
    summary = run.summary
    cards = "".join(
        f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in _cards(run)
    )

    # Name the weights of the final results.
    reason = summary.get("exit_reason")
    if not reason:
        reason = "not begun" if run.last is None else f"at step {run.last:,}"
    final = _dict(summary.get("final"))
    if final and not summary.get("exit_code"):
        raw = " raw" if len(run.weights()) > 1 else ""
        of = f"{final.get('weights')}{raw} weights, of step {final.get('step')}"
        device = f", on {run.environment['device']}" if "device" in run.environment else ""
        reason = f"{reason}{device}; eval (validation) and test metrics: {of}"

    head = f"<h2>{_safe(run.name)}</h2>" if several else ""
    words = "".join(f"<p>{_safe(sentence)}</p>" for sentence in _sentences(run))
    return (
        f'<section>{head}<p class="reason">{_safe(str(reason))}</p><dl '
        f'class="cards">{cards}</dl>{words}</section>'
    )


def _cards(run: Record) -> Iterator[tuple[str, str]]:
    """Yield name and value of each headline number."""
    summary = run.summary
    for name, value in summary.items():
        if ("eval/" in name or "test/" in name) and isinstance(value, float):
            yield name.replace("/", " ").replace("_", " "), _short(value)
    best = _dict(summary.get("best"))
    if best.get("value") is not None:
        metric = str(best.get("metric")).replace("/", " ")
        if len(run.weights()) > 1:
            metric += " (raw)"
        yield f"best {metric}, at step {best.get('step')}", _short(best["value"])
    for name in ("step", "samples", "tokens"):
        if name in summary:
            yield name, f"{number(summary[name]):,.0f}"
    if "seconds" in summary:
        yield "time", f"{number(summary['seconds']):,.0f} s"
    rate = constant(run, "train/lr")
    if rate is not None:
        yield "learning rate", _short(rate)


def _sentences(run: Record) -> Iterator[str]:
    """Yield the sentences about the run's time and batch size."""
    for key in ("time", "noise_scale"):
        text = str(run.summary.get(key, ""))
        if text and " n/a" not in text:
            yield text
    goodput = run.summary.get("goodput")
    if isinstance(goodput, dict):
        yield str(goodput.get("about"))
    for share in run.curve("profile/exposed_communication")[1][-1:]:
        yield (
            f"Communication that nothing overlapped took {100 * share:.1f} % of the profiled steps."
        )


def _classes(run: Record, *, several: bool) -> str:
    confusion = matrix_of(run.examples.get("confusion"))
    if not confusion:
        return ""
    title = f"Classes of {run.name}" if several else "Classes"
    head = ["class", "samples", "precision", "recall", "F1"]
    shown = _region(title, table(head, of_classes(confusion)))
    return f"<section><details><summary>{_safe(title)}</summary>{shown}</details></section>"


def _events(run: Record) -> str:
    events = run.events()
    if not events:
        return ""
    lines = []
    for event in events:
        samples = ", ".join(map(str, _list(event.get("ids"))[:32]))
        lines.append((event["step"], event["event"], event.get("why", ""), samples))
    kinds = [str(event["event"]) for event in events]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    title = f"Events of {run.name}: {counts}"
    if len(events) >= EVENTS:
        title += ", some of many"
    shown = _region("Events", table(["step", "event", "why", "samples"], lines))
    return f"<section><details><summary>{_safe(title)}</summary>{shown}</details></section>"


def _about(run: Record, *, several: bool) -> str:
    of = f" of {_safe(run.name)}" if several else ""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False)
    environment = yaml.safe_dump(run.environment, sort_keys=False)
    return (
        f"<section><h2>To repeat it{of}</h2><pre "
        f'tabindex="0"><code>{_safe(_command(run.environment))}</code></pre>'
        f'<details><summary>Recipe{of}</summary><pre tabindex="0">{_safe(recipe)}</pre></details>'
        f"<details><summary>Environment{of}</summary><pre "
        f'tabindex="0">{_safe(environment)}</pre></details></section>'
    )


def _command(environment: Mapping[str, Any]) -> str:
    """Return the command that repeats a run in another folder."""
    # Change the folder, because a finished run's folder rejects another run.
    arguments = [str(word) for word in _list(environment.get("command"))[1:]]
    if "--run.dir" in arguments[:-1]:
        at = arguments.index("--run.dir") + 1
        arguments[at] = f"{arguments[at]}-again"
    else:
        arguments += ["--run.dir", "runs/again"]

    processes = environment.get("processes", 1)
    if not isinstance(processes, int):
        processes = 1
    settings = _dict(environment.get("accelerate"))
    precision = str(settings.get("ACCELERATE_MIXED_PRECISION", "no"))
    if str(settings.get("ACCELERATE_USE_FSDP", "false")).lower() == "true":
        config = "fsdp2"
    elif processes > 1:
        config = "ddp"
    else:
        config = "single"

    options = ["--config_file", config]
    if processes > 1:
        options += ["--num_processes", str(processes)]
    if precision != "no":
        options += ["--mixed_precision", precision]
    return shlex.join(["oneloop", "launch", *options, *arguments])


def _list(value: Any) -> list[Any]:
    """Return the value if it is a list; else an empty one, because files may be damaged."""
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict; else an empty one."""
    return value if isinstance(value, dict) else {}


def _region(name: str, table: str) -> str:
    return f'<div class="wide" role="region" aria-label="{_safe(name)}" tabindex="0">{table}</div>'


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table.

    Args:
        head: titles of the columns.
        lines: the rows.
    """
    cells = "".join(f'<th scope="col">{_safe(title)}</th>' for title in head)
    body = ""
    for line in lines:
        row = "".join(f"<td>{_safe(_short(cell))}</td>" for cell in line)
        body += f"<tr>{row}</tr>"
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _safe(text: str) -> str:
    return html.escape(text)
