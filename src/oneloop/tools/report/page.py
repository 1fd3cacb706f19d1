"""Assemble the report page: ``page.html`` is its template.

>>> Path("report.html").write_text(report([Path("runs/digits")]))

plotly draws the curves; its code is in the page, compressed, so that nothing is fetched. Colours
follow the reader's light or dark theme. Every chart also has its metrics as a table, for screen
readers and for copying.
"""

import base64
import gzip
import hashlib
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from oneloop.basics.files import (
    cache_folder,
    reject_run_folder,
    replacing,
    writing,
    yaml_text,
)
from oneloop.tools.report.advice import goodput, results, sentences
from oneloop.tools.report.charts import axes, charts, constant
from oneloop.tools.report.example_pages import sample_cards
from oneloop.tools.report.headline import comparison, ranked, short
from oneloop.tools.report.matrices import matrices_of, of_classes
from oneloop.tools.run_reader import Record, distinct, number, read_record

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


def _page(runs: list[Record]) -> str:
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    ranking = ranked(runs)
    drawn = charts(ranking.runs)

    # All texts are escaped when they are written into the template.
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    environment.filters["shell"] = shlex.join
    environment.filters["whole"] = lambda value: f"{number(value):,.0f}"

    # Allow these two scripts, and nothing else, by the content security policy.
    digest, plotly = _packed_plotly()
    script = (here / "page.js").read_text(encoding="utf-8")
    digests = (digest, hashlib.sha256(script.encode()).digest())
    return environment.get_template("page.html").render(
        title=title,
        compared=comparison(ranking) if len(runs) > 1 else None,
        runs=[_shown(run, several=len(runs) > 1) for run in ranking.runs],
        axes=axes(runs),
        charts=drawn,
        drawn=[{"data": chart["data"], "layout": chart["layout"]} for chart in drawn],
        allowed=map(_base64, digests),
        plotly=_base64(plotly),
        script=script,
    )


def _shown(run: Record, *, several: bool) -> dict[str, Any]:
    """Return what the page shows of a run, besides charts."""
    tables = {name: of_classes(matrix) for name, matrix in matrices_of(run.examples).items()}
    return {
        "record": run,
        "name": run.name,
        "of": f" of {run.name}" if several else "",
        "rate": constant(run, "train/lr"),
        "sentences": [*sentences(run)],
        "samples": sample_cards(run.examples),
        "classes": tables,
        "words": _words(run.environment.get("command")),
        "recipe": yaml_text(run.recipe),
        "environment": yaml_text(run.environment),
    }


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


def _words(command: Any) -> list[str]:
    """Return the arguments of a command that repeats a run in another folder.

    A finished run's folder rejects another run.
    """
    words = list(map(str, command[1:])) if isinstance(command, list) else []
    if "--run.dir" in words[:-1]:
        at = words.index("--run.dir") + 1
        words[at] = f"{words[at]}-again"
        return words
    return [*words, "--run.dir", "runs/again"]
