"""Write what a reader sees of runs: their report pages, model cards, ``watch`` and ``compare``.

    PYTHONPATH=../before/src python benchmarks/visible_text.py before RUN RUN …
    PYTHONPATH=src python benchmarks/visible_text.py after RUN RUN …
    diff -r before after

The first argument is the folder to write to. Of a page, each line is the text of one block, and
each trace of a chart is one line of JSON. The texts of images and labels for screen readers count
as visible.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

INLINE = {"b", "code", "mark", "span"}
SPOKEN = ("alt", "aria-label", "title", "data-title")


class Lines(HTMLParser):
    """The visible text of a page, one line per block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.code: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in INLINE:
            self.lines.append("")
        for name, value in attrs:
            if name in SPOKEN:
                self.lines[-1] += f"[{name}: {value}] "
        if tag not in ("meta", "link", "img", "input"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside.pop()
        if tag not in INLINE:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.code.append(data)
        elif "style" not in self._inside:
            if "pre" not in self._inside:
                data = " ".join(f"<{data}>".split())[1:-1]  # keep one space at each end
            self.lines[-1] += data


def page_lines(page: str) -> list[str]:
    """Return the lines of a report page, and one for each layout and trace of its charts."""
    parser = Lines()
    parser.feed(page)
    lines = [line.strip() for line in parser.lines if line.strip()]
    for chart in json.loads(parser.code[1]):
        lines.append(f"layout {json.dumps(chart['layout'], sort_keys=True)}")
        lines += [f"trace {json.dumps(trace, sort_keys=True)}" for trace in chart["data"]]
    return lines


def printed(words: list[str]) -> list[str]:
    """Return the lines that a command prints in a terminal of 120 columns."""
    environment = {**os.environ, "COLUMNS": "120", "LINES": "40"}
    command = [sys.executable, "-m", "oneloop", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return [*ended.stdout.splitlines(), *ended.stderr.splitlines(), f"exit {ended.returncode}"]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("to", type=Path)
    asked.add_argument("runs", nargs="+", type=Path)
    given = asked.parse_args()
    from oneloop.checkpoint.manifest import read_manifest
    from oneloop.tools.export.model_card import model_card
    from oneloop.tools.report.page import report

    texts = {"all.page": page_lines(report(given.runs))}
    texts["all.compare"] = printed(["compare", *map(str, given.runs)])
    for run in given.runs:
        texts[f"{run.name}.page"] = page_lines(report([run]))
        about = read_manifest(run / "final")["about"]
        card = model_card(run, f"org/{run.name}", about, licence="mit", language_model=True)
        texts[f"{run.name}.card"] = html.unescape(card).splitlines()
        texts[f"{run.name}.watch"] = printed(["watch", "--once", str(run)])
    given.to.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (given.to / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
