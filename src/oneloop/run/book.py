"""What is written down of a run, and shown: each line headed by the counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oneloop.run.counters import Counters, Results
from oneloop.show.display import Display
from oneloop.show.examples import Examples
from oneloop.show.tracking import Tracking


class Book:
    """Lines for metrics.jsonl, the trackers and the terminal; ``unit`` is what the weight counts, samples or tokens.
    ``resumed`` is whether the run continues a checkpoint of its own folder."""

    def __init__(
        self,
        count: Counters,
        results: Results,
        tracking: Tracking,
        display: Display,
        *,
        unit: str = "samples",
        resumed: bool = False,
    ) -> None:
        self._count, self._results, self._tracking, self._display = count, results, tracking, display
        self._unit, self.resumed = unit, resumed

    def line(self, **figures: Any) -> dict[str, Any]:
        """These figures, headed by the counters; what is given here again takes the counter's place."""
        return {**self._count.figures(self._unit), **figures}

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line down."""
        self._tracking.log(line)

    def event(self, name: str) -> None:
        """Writes down that something happened."""
        self.write(self.line(event=name))

    def log(self, figures: Mapping[str, float], remarks: Iterable[str], **more: str) -> None:
        """Training figures, and what there is to say of them; ``more`` is written down only."""
        self._results["train/loss"] = figures["train/loss"]
        self.write(self.line(time=self._count.elapsed(), **figures, **more))
        self._display.figures(self._count.step, figures, remarks)

    def evaluated(
        self,
        by_weights: Mapping[str, Mapping[str, float]],
        examples: Examples | None = None,
        *,
        of: int | None = None,
    ) -> None:
        """The results of an evaluation by the weights that were evaluated (``raw``, an average's name). At the end they
        may be ``of`` an earlier step, the best: what was written down then is not written again."""
        step = self._count.step if of is None else of
        if examples is not None:
            self._tracking.show(step, examples)
        for weights, figures in by_weights.items():
            self._results.take(figures, weights)
            new = {name: value for name, value in figures.items() if of is None or name.startswith("test/")}
            if new:
                self.write(self.line(step=step, **new, weights=weights))
            self._display.results(step, figures, weights)
