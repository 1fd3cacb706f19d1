"""Output during a run: progress bars on a terminal, plain lines elsewhere, nothing on other ranks.

>>> with Display() as display:
...     display.begin(lambda: step, total=1000)
...     for batch in tracked(loader, "evaluating", total=len(loader)):  # a nested bar
...         ...
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import Token
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from oneloop.basics.files import dumps, printable
from oneloop.basics.progress import BARS

_BAR = 60  # columns of the other fields of a progress bar


class _Bars(Progress):
    """Progress bars that read the current step when they are drawn, so that a step costs nothing.

    A redraw holds the interpreter for about 2 ms, so it happens once a second (default of rich: ten
    times)."""

    def __init__(self, *columns: Any, console: Console) -> None:
        self.steps: tuple[TaskID, Callable[[], int]] | None = None
        super().__init__(*columns, console=console, transient=True, refresh_per_second=1)

    def get_renderable(self) -> RenderableType:
        if self.steps:
            task, now = self.steps
            self.update(task, completed=now())
        return super().get_renderable()


class _Console(Console):
    """A console that becomes quiet when its output pipe is closed (``| head``)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Display:
    """The display of steps, metrics and other progress; ``with Display(...) as display``.

    A terminal shows bars; other output gets plain lines.

    Args:
        shown: False on all ranks but one.
        quiet: show only what :meth:`say` reports.
        as_json: print JSON lines for other programs.
        console: the terminal; None: the process's own.
        interval: least number of seconds between two plain lines of metrics.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        quiet: bool = False,
        as_json: bool = False,
        console: Console | None = None,
        interval: float = 1.0,
    ) -> None:
        self._quiet = quiet
        self._as_json = as_json
        self._console = console or _Console(quiet=not shown)

        # the last step, the first step of this process, and the time at that step
        self._total = 0
        self._start = 0
        self._began = time.monotonic()

        self._interval = interval
        self._last = float("-inf")  # time of the last plain line of metrics

        self.bars: _Bars | None = None
        self._outer: Token[Progress | None] | None = None
        if shown and self._console.is_terminal and not quiet and not as_json:
            self.bars = _Bars(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(20),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )

    def begin(self, now: Callable[[], int], *, total: int) -> None:
        """Show progress.

        Args:
            now: returns the current step, also in another thread.
            total: the last step.
        """
        self._start = now()
        self._total = total
        self._began = time.monotonic()
        if self.bars:
            task = self.bars.add_task("step", total=total, completed=self._start, text="")
            self.bars.steps = (task, now)

    def __enter__(self) -> "Display":
        self._outer = BARS.set(self.bars)
        if self.bars:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._outer is not None:
            BARS.reset(self._outer)
        if self.bars:
            self.bars.stop()

    def metrics(
        self,
        step: int,
        metrics: Mapping[str, float],
        remarks: Iterable[str] = (),
        named: Iterable[str] = (),
    ) -> None:
        """Show the training metrics of a log step: loss, metrics of the task, rate.

        Args:
            step: the step.
            metrics: all metrics, by name.
            remarks: lines to show before the metrics.
            named: names of the task's metrics.
        """
        self.lines(remarks)
        if self._as_json:
            self._json({"step": step, **metrics})
            return
        parts = []
        for name in ("train/loss", *named):
            parts.append(f"{name.removeprefix('train/')} {metric(metrics[name])}")
        rate = f"{metrics['train/samples_per_second']:,.0f} samples/s"
        now = time.monotonic()
        if self.bars and self.bars.steps:
            # Leave out the metrics that do not fit; always show the loss.
            room = self._console.width - _BAR - len(rate)
            while len(parts) > 1 and len("  ".join(parts)) > room:
                parts.pop()
            self.bars.update(self.bars.steps[0], text="  ".join([*parts, rate]))
        elif now - self._last >= self._interval or step == self._total:
            self._last = now
            left = (now - self._began) / max(1, step - self._start) * (self._total - step)
            parts = [f"step {step}/{self._total}", *parts, rate, f"{left:.0f} s left"]
            self.lines(self._wrapped(parts))

    def results(self, step: int, results: Mapping[str, float], weights: str = "raw") -> None:
        """Show the metrics of an evaluation.

        Args:
            step: the step.
            results: the metrics, by name.
            weights: ``raw``, or the name of an EMA.
        """
        if self._as_json:
            self._json({"step": step, **results, "weights": weights})
            return
        parts = [f"step {step}"]
        for name, value in results.items():
            parts.append(f"{name} {metric(value)}")
        if weights != "raw":
            parts.append(f"({weights})")
        self.lines(self._wrapped(parts))

    def _wrapped(self, parts: Iterable[str]) -> list[str]:
        """Join parts by two spaces.

        On a terminal, a part that does not fit moves to the next line as a whole.
        """
        width = self._console.width if self._console.is_terminal else sys.maxsize
        lines: list[str] = []
        for part in parts:
            if lines and len(lines[-1]) + 2 + len(part) <= width:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}" if lines else part)
        return lines

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Show the summary of the run as a table."""
        if not self._quiet and not self._as_json and "samples" in summary:
            self._console.print(summary_table(summary))

    def say(self, text: str) -> None:
        """Show one permanent line, even if ``quiet``."""
        self._print(dumps({"message": text}) if self._as_json else printable(text))

    def lines(self, texts: Iterable[str]) -> None:
        """Show permanent lines, unless ``quiet``."""
        for text in texts:
            if not self._quiet:
                self.say(text)

    def _json(self, content: Mapping[str, object]) -> None:
        """Show metrics as a line of JSON, unless ``quiet``."""
        if not self._quiet:
            self._print(dumps(content))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def metric(value: float) -> str:
    """Format a metric with four decimals, or with none from 10,000 on."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4f}"


def _plain(name: str) -> Text:
    """Return a name as table text without markup and control characters."""
    return Text(printable(name))


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of summary.json: results by weights (raw, EMAs), steps, samples and time."""
    # Find the metrics and their weights. An EMA's metric has the EMA's name before its own.
    best = summary.get("best") or {}
    names = [name for name, value in summary.items() if "/" in name and isinstance(value, float)]
    averages = {}
    for name in names:
        average, _, own = name.partition("/")
        if own in summary:
            averages[name] = average
    kinds = dict.fromkeys(averages.get(name, "weights") for name in names)

    # Make a column for each kind of weights.
    final = {} if summary.get("exit_code") else summary.get("final") or {}
    of = f" ({final['weights']}, of step {final['step']:,})" if final else ""
    heads = []
    for kind in kinds:
        head = kind
        if kind == "weights" and len(kinds) > 1:
            head = "raw weights"
        heads.append(Column(_plain(f"{head}{of}")))
    table = Table("", *heads, title=None, show_edge=False, pad_edge=False)

    # Add a row for each metric.
    rows = dict.fromkeys(name.removeprefix(f"{averages.get(name, '')}/") for name in names)
    for row in rows:
        cells = []
        for kind in kinds:
            value = summary.get(row if kind == "weights" else f"{kind}/{row}")
            cells.append("" if value is None else metric(value))
        label = "train/loss (last mean)" if row == "train/loss" else row
        table.add_row(_plain(label), *cells)
    table.add_section()

    # Add the rows about the whole run.
    if best.get("value") is not None:
        found = f"{metric(best['value'])} at step {best['step']:,}"
        table.add_row(_plain(f"best {best['metric']}"), found)
    for name in ("step", "samples", "tokens"):
        if name in summary:
            table.add_row(name, f"{summary[name]:,}")
    if summary.get("seconds"):
        rate = ""
        if summary.get("samples"):
            rate = f"{summary['samples'] / summary['seconds']:,.0f} samples/s on average"
        table.add_row("time", f"{summary['seconds']:,.1f} s, {rate}")
    return table
