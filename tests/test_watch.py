"""What a person sees: plain lines off a terminal, a bar on one, nothing on other ranks."""

from __future__ import annotations

import io

from rich.console import Console

from oneloop.watch.progress import Display

FIGURES = {"train/loss": 1.5, "train/samples_per_second": 1234.0}


def shown(*, terminal: bool, on: bool = True) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, quiet=not on)
    with Display(100, shown=on, console=console, interval=0.0) as display:
        display.begin(40)
        display.figures(50, FIGURES)
        display.results(50, {"eval/loss": 0.25})
        display.say("a line that stays [not markup]")
        display.figures(100, FIGURES)
    return text.getvalue()


def test_plain_lines_off_a_terminal():
    lines = shown(terminal=False).splitlines()
    assert lines[0].startswith("step 50/100  loss 1.5000  1,234 samples/s") and lines[0].endswith("s left")
    assert lines[1:3] == ["step 50  eval/loss 0.2500", "a line that stays [not markup]"]
    assert lines[3].startswith("step 100/100")


def test_a_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "100/100" in text and "━" in text and "eval/loss 0.2500" in text


def test_nothing_on_other_ranks():
    assert shown(terminal=True, on=False) == ""
