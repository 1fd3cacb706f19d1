"""Output during a run: progress bars on a terminal, plain lines elsewhere, nothing on other ranks.

>>> with Display() as display:
...     display.begin(lambda: step, total=1000)
...     for batch in tracked(loader, "evaluating", total=len(loader)):  # a nested bar
...         ...
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import Token

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
from rich.table import Column

from oneloop.basics.files import dumps, printable
from oneloop.basics.progress import BARS

_INTERVAL = 1.0  # least number of seconds between two plain lines of metrics


class _Bars(Progress):
    """Progress bars that read the current step when they are drawn, so that a step costs nothing.

    A redraw holds the interpreter for about 2 ms, so it happens once a second (default of rich: ten
    times)."""

    steps: tuple[TaskID, Callable[[], int]] | None = None

    def get_renderable(self) -> RenderableType:
        if self.steps:
            task, now = self.steps
            self.update(task, completed=now())
        return super().get_renderable()


class Display:
    """The display of steps, metrics and other progress; ``with Display(...) as display``.

    A terminal shows bars; other output gets plain lines.

    Args:
        shown: False on all ranks but one.
        output: ``progress``; ``quiet``: only what :meth:`say` reports; ``json``: JSON lines, for
            other programs.
        console: the terminal; None: the process's own.
    """

    def __init__(
        self,
        *,
        shown: bool = True,
        output: str = "progress",
        console: Console | None = None,
    ) -> None:
        self.output = output
        self._console = console or Console(quiet=not shown)
        self._last = 0.0  # time of the last plain line of metrics

        self.bars: _Bars | None = None
        if shown and self._console.is_terminal and output == "progress":
            self.bars = _Bars(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(20),
                # Metrics that do not fit are cut off.
                TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True)),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=1,
                expand=True,
            )

    def begin(self, now: Callable[[], int], *, total: int) -> None:
        """Show progress.

        Args:
            now: returns the current step, also in another thread.
            total: the last step.
        """
        self._start = now()  # the first step of this process
        self._began = time.monotonic()
        self._total = total
        if self.bars:
            task = self.bars.add_task("step", total=total, completed=self._start, text="")
            self.bars.steps = (task, now)

    def __enter__(self) -> "Display":
        self._outer: Token[Progress | None] = BARS.set(self.bars)
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *of: object) -> None:
        BARS.reset(self._outer)
        if self.bars:
            self.bars.stop()

    def metrics(
        self,
        step: int,
        metrics: Mapping[str, float],
        named: Iterable[str] = (),
    ) -> None:
        """Show the training metrics of a log step, after :meth:`begin`: loss, rate, and others.

        Args:
            step: the step.
            metrics: all metrics, by name.
            named: names of the task's metrics.
        """
        rate = f"{metrics['train/samples_per_second']:,.0f} samples/s"
        parts = [f"loss {metric(metrics['train/loss'])}", rate]
        for name in named:
            parts.append(f"{name.removeprefix('train/')} {metric(metrics[name])}")
        now = time.monotonic()
        if self.bars and self.bars.steps:
            self.bars.update(self.bars.steps[0], text="  ".join(parts))
        elif self.output == "json" or now - self._last >= _INTERVAL or step == self._total:
            self._last = now
            left = (now - self._began) / max(1, step - self._start) * (self._total - step)
            parts = [f"step {step}/{self._total}", *parts, f"{left:.0f} s left"]
            self._print({"step": step, **metrics}, parts)

    def results(self, step: int, results: Mapping[str, float], weights: str = "raw") -> None:
        """Show the metrics of an evaluation.

        Args:
            step: the step.
            results: the metrics, by name.
            weights: ``raw``, or the name of an EMA.
        """
        parts = [f"step {step}", *(f"{name} {metric(value)}" for name, value in results.items())]
        if weights != "raw":
            parts.append(f"({weights})")
        self._print({"step": step, **results, "weights": weights}, parts)

    def say(self, text: str) -> None:
        """Show one permanent line, even if ``quiet``."""
        self._print({"message": text}, [text], always=True)

    def lines(self, texts: Iterable[str]) -> None:
        """Show permanent lines, unless ``quiet``."""
        for text in texts:
            self._print({"message": text}, [text])

    def _print(
        self, content: Mapping[str, object], parts: Iterable[str], *, always: bool = False
    ) -> None:
        """Print the parts of a line, or its content as JSON."""
        if always or self.output != "quiet":
            text = dumps(content) if self.output == "json" else printable("  ".join(parts))
            self._console.out(text, highlight=False)


def metric(value: float) -> str:
    """Format a metric with four decimals, or with none from 10,000 on."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4f}"
