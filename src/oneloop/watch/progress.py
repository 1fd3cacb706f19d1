"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere; nothing on other ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Shows steps and figures; ``with Display(...) as display``.

    Args:
        total: steps of the run.
        shown: False on all ranks but one.
        quiet: only what :meth:`say` says.
        as_json: figures and messages as JSON lines, for other programs.
        console: where to; a terminal gets a bar.
        interval: seconds between two plain lines, at least.
    """

    def __init__(
        self, total: int, *, shown: bool = True, quiet: bool = False, as_json: bool = False,
        console: Console | None = None, interval: float = 1.0,
    ) -> None:  # fmt: skip
        self._quiet, self._as_json = quiet, as_json
        self._total, self._start, self._began = total, 0, time.monotonic()
        self._console = console or Console(quiet=not shown)
        self._bar: Progress | None = None
        self._interval, self._last = interval, float("-inf")
        if shown and self._console.is_terminal and not quiet and not as_json:
            self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"),
                                 TextColumn("left"), TimeRemainingColumn(), console=self._console)  # fmt: skip
            self._task = self._bar.add_task("train", total=total, text="")

    def begin(self, start: int) -> None:
        """From which step the run goes on."""
        self._start, self._began = start, time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=start)

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows the training figures of a log step."""
        if self._quiet:
            return
        if self._as_json:
            self._json({"step": step, **figures})
            return
        text = f"loss {figures['train/loss']:.4f}  {figures['train/samples_per_second']:,.0f} samples/s"
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif now - self._last >= self._interval or step == self._total:
            self._last = now
            left = (now - self._began) / max(1, step - self._start) * (self._total - step)
            self.lines([f"step {step}/{self._total}  {text}  {left:.0f} s left"])

    def results(self, step: int, results: Mapping[str, float], weights: str = "raw") -> None:
        """Shows an evaluation, of the weights or of an average of them."""
        if self._as_json:
            self._json({"step": step, **results, "weights": weights})
            return
        figures = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
        figures += "" if weights == "raw" else f"  ({weights})"
        self.lines([f"step {step}  {figures}"])

    def say(self, text: str) -> None:
        """Shows one line that stays, also when all else is quiet."""
        self._print(text)

    def lines(self, texts: Iterable[str]) -> None:
        """Shows lines that stay."""
        for text in texts:
            if not self._quiet:
                self._print(text)

    def _print(self, text: str) -> None:
        if self._as_json:
            self._json({"message": text})
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _json(self, content: Mapping[str, object]) -> None:
        if not self._quiet:
            self._console.print(json.dumps(content), highlight=False, markup=False, soft_wrap=True)
