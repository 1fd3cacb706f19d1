"""Assemble the report page.

>>> Path("report.html").write_text(report([Path("runs/digits")]))

plotly draws the curves; its code is in the page, compressed, so that nothing is fetched. Colours
follow the reader's light or dark theme. Every chart also has its metrics as a table, for screen
readers and for copying.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oneloop.basics.files import (
    cache_folder,
    reject_run_folder,
    replacing,
    writing,
    yaml_text,
)
from oneloop.tools.report.advice import goodput, results, sentences
from oneloop.tools.report.charts import axes, charts, rows
from oneloop.tools.report.example_pages import sections
from oneloop.tools.report.headline import (
    Ranking,
    cards,
    comparison,
    headline,
    ranked,
    short,
    trained,
)
from oneloop.tools.report.matrices import matrices_of, of_classes
from oneloop.tools.run_reader import (
    Record,
    differences,
    distinct,
    entries,
    read_record,
)

_TABLE_ROWS = 200
_DIGEST = 32  # bytes of SHA-256


def report(folders: Sequence[Path]) -> str:
    """Return the page of one run, or of several in the same charts.

    Raises:
        BadInput: a folder holds no run.
    """
    return _page(distinct([read_record(folder) for folder in folders]))


def ended(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the page of a run that has just ended, what else its summary gets, and sentences.

    Raises:
        BadInput: the folder holds no run.
    """
    run = read_record(folder)
    more = {}
    if "seconds" in run.summary:  # it has not failed
        more["goodput"] = goodput(run, now=time.time())
        run.summary |= more
    return _page([run]), more, [*sentences(run), *results(run.summary)]


def _page(runs: list[Record]) -> str:
    several = len(runs) > 1
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    body = [f"<h1>{_safe(title)}</h1>"]

    # First, what came out: the results, and samples. Of several runs, open those of the best one.
    if several:
        ranking = ranked(runs)
        runs = ranking.runs
        body += [_comparison(ranking), *sections(runs[0].examples, of=f" of {runs[0].name}")]
        for run in runs[1:]:
            samples = "".join(sections(run.examples, of=f" of {run.name}"))
            body.append(_folded(f"Samples of {run.name}", samples))
    else:
        body += [_headline(runs[0]), *sections(runs[0].examples)]

    # Then the curves, and at last everything about each run.
    drawn = charts(runs)
    body.append(_axis(axes(runs)))
    body += [chart_section(number, chart) for number, chart in enumerate(drawn)]
    body += [_classes(run, several=several) for run in runs]
    if several:
        body += [_folded(f"Numbers of {run.name}", _headline(run)) for run in runs]
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
        BadInput: a folder holds no run, the file cannot be written, or it is one of a run.
    """
    if to is None:
        folder = runs[0] if len(runs) == 1 else Path()
        to = folder / "report.html"
    else:
        reject_run_folder(to)
    page = report(runs)
    with writing(f"--to {to}", "make room, or name another file"), replacing(to) as draft:
        draft.write_text(page, encoding="utf-8")
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

    # Allow these two scripts, and nothing else, by the content security policy.
    digest, plotly = _packed_plotly()
    digests = (digest, hashlib.sha256(script.encode()).digest())
    return page.format(
        title=_safe(title),
        allowed=" ".join(f"'sha256-{_base64(one)}'" for one in digests),
        style=style,
        body="\n".join(filter(None, body)),
        plotly=_base64(plotly),
        charts=data.replace("<", "\\u003c"),
        script=script,
    )


def _packed_plotly() -> tuple[bytes, bytes]:
    """Return the SHA-256 of plotly's JavaScript, and the JavaScript, compressed by gzip.

    The cache folder keeps them, because compressing takes 0.2 s. If its file is damaged, the
    browser runs nothing: the code differs from the digest.
    """
    # Find the file without the import of plotly, which takes a second.
    package = find_spec("plotly")
    assert package is not None and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "package_data", "plotly.min.js")
    kept = cache_folder() / f"plotly-{source.stat().st_size}-{source.stat().st_mtime_ns}.gz"
    try:
        content = kept.read_bytes()
    except OSError:
        # Compress it, and keep the result if the folder can be written.
        code = source.read_bytes()
        content = hashlib.sha256(code).digest() + gzip.compress(code, 6)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with replacing(kept, shared=True) as draft:
                draft.write_bytes(content)
    return content[:_DIGEST], content[_DIGEST:]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


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


def _folded(title: str, content: str) -> str:
    """Return a section that the reader opens; empty without content."""
    if not content:
        return ""
    return f"<section><details><summary>{_safe(title)}</summary>{content}</details></section>"


def _headline(run: Record) -> str:
    """Return the results of a run as cards, how it ended, and what oneloop says about its speed."""
    shown = "".join(
        f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in cards(run)
    )
    words = "".join(f"<p>{_safe(sentence)}</p>" for sentence in sentences(run))
    reason = f'<p class="reason">{_safe(headline(run))}</p>'
    what = f'<p class="soft">{_safe(trained(run))}</p>'
    return f'<section>{reason}{what}<dl class="cards">{shown}</dl>{words}</section>'


def _comparison(ranking: Ranking) -> str:
    """Return the table of several runs, and all keys that differ."""
    title = "Runs"
    if ranking.metric:
        which = "largest" if ranking.larger_is_better else "smallest"
        title = f"Runs, the best one first: by the {which} {ranking.metric}"
    shown = _region(title, table(*comparison(ranking)))
    if ranking.metric:
        shown = shown.replace("<tbody><tr>", '<tbody><tr class="best">', 1)
    changed = differences(ranking.runs)
    keys = table(["key", *(run.name for run in ranking.runs)], changed)
    more = "<p>The recipes are equal, except for run.dir.</p>"
    if changed:
        more = _folded(f"Keys that differ: {len(changed)}", _region("Keys that differ", keys))
    note = f"Columns named eval/ and test/ have the last values. {ranking.runs[0].name}: "
    note = f'<p class="soft">{_safe(note + trained(ranking.runs[0]))}</p>'
    return f"<section><h2>{_safe(title)}</h2>{shown}{note}{more}</section>"


def _axis(quantities: Mapping[str, str]) -> str:
    """Return the switch for the quantity on the x axis of the charts; empty if there is one."""
    if len(quantities) < 2:
        return ""
    switch = '<fieldset class="axis"><legend>Charts by</legend>'
    for name, title in quantities.items():
        checked = "checked" if name == "step" else ""
        switch += (
            f'<label><input type="radio" name="axis" value="{_safe(name)}" '
            f'data-title="{_safe(title)}" {checked}> {_safe(name)}</label>'
        )
    return f"{switch}</fieldset>"


def _classes(run: Record, *, several: bool) -> str:
    """Return a table of the classes of each matrix that says how often each is right."""
    found = ""
    for name, matrix in matrices_of(run.examples).items():
        lines = of_classes(matrix)
        title = "Classes" if name == "confusion" else f"Classes by {name}"
        title += f" of {run.name}" if several else ""
        head = ["class", "samples", "precision", "recall", "F1"]
        found += _folded(title, _region(title, table(head, lines))) if lines else ""
    return found


def _events(run: Record) -> str:
    if not run.events:
        return ""
    lines = []
    for event in run.events:
        samples = ", ".join(map(str, _list(event.get("ids"))[:32]))
        lines.append((event["step"], event["event"], event.get("why", ""), samples))
    counts = ", ".join(f"{kind} {count}" for kind, count in run.event_counts.items())
    title = f"Events of {run.name}: {counts}"
    if run.event_counts.total() > len(lines):
        title += f"; the newest {len(lines):,}"
    return _folded(title, _region("Events", table(["step", "event", "why", "samples"], lines)))


def _about(run: Record, *, several: bool) -> str:
    of = f" of {_safe(run.name)}" if several else ""
    recipe = yaml_text(run.recipe)
    environment = yaml_text(run.environment)
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
    settings = entries(environment.get("accelerate"))
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
        row = "".join(f"<td>{_safe(short(cell))}</td>" for cell in line)
        body += f"<tr>{row}</tr>"
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _safe(text: str) -> str:
    return html.escape(text)
