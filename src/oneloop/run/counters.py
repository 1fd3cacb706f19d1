"""The counters of a run: all that drives the order, the learning rate and the durations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Counters:
    """One counter, one meaning. ``position`` and ``samples`` part only by steps that were not taken."""

    position: int = 0
    """samples drawn from the order, skipped steps included; drives which samples come next"""
    step: int = 0
    """optimizer updates done"""
    samples: int = 0
    """samples trained on"""
    weight: float = 0.0
    """summed weight trained on: samples, or target tokens for text"""
    reductions: int = 0
    """times that the plateau schedule lowered the learning rate"""
    waited: int = 0
    """evaluations since the best one or the last reduction"""
    seconds: float = 0.0
    """spent on the run by earlier starts"""
    evaluation_due: bool = False
    """a stop came before the evaluation of this step was done"""

    @property
    def passed_over(self) -> int:
        """Samples drawn but not trained on: of bad steps that the policy leaves out, and of fp16 loss scaling."""
        return self.position - self.samples

    def begin(self) -> None:
        """The clock of :meth:`elapsed` goes on from here; a rewind does not turn it back."""
        self._began = time.perf_counter() - self.seconds

    def elapsed(self) -> float:
        """Seconds spent on the run, over all starts."""
        return time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def trained(self, samples: int, weight: float) -> None:
        """One update was made with ``samples`` samples of this summed weight."""
        self.step += 1
        self.samples += samples
        self.weight += weight

    def evaluated(self, better: bool, *, patience: int) -> None:
        """An evaluation was made; after ``patience`` of them without a better one the plateau schedule steps down."""
        self.waited = 0 if better else self.waited + 1
        if patience and self.waited >= patience:
            self.reductions += 1
            self.waited = 0

    def figures(self, unit: str) -> dict[str, int]:
        """What stands at the head of every line of metrics."""
        tokens = {"tokens": int(self.weight)} if unit == "tokens" else {}
        return {"step": self.step, "samples": self.samples, **tokens}


class Results(dict[str, float]):
    """The latest figure of each kind; those of an average are headed by its name."""

    def take(self, figures: Mapping[str, float], weights: str) -> None:
        """Takes in the evaluation of these weights (``raw``, or an average's name)."""
        self.update(figures if weights == "raw" else {f"{weights}/{name}": value for name, value in figures.items()})

    def __missing__(self, name: str) -> float:
        raise ValueError(
            f"eval.best {name!r}: the evaluation has no single figure of that name; it has {', '.join(self)}"
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


@dataclass
class Best:
    """The best evaluation so far, and how many have passed since."""

    value: float | None = None
    step: int = 0
    since: int = 0
    """evaluations since the best one"""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def update(self, value: float, step: int, *, higher_is_better: bool) -> bool:
        """Take one result; True where it is the best so far. NaN never is."""
        better = value == value and (
            self.value is None or (value > self.value if higher_is_better else value < self.value)
        )
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better
