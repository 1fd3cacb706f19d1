"""The learning rate as a pure function of the step: nothing to save, nothing to fall out of step.

A schedule is a function ``(step, total) -> factor`` of the peak rate, both counted from the end of the warm-up; it may
take ``final`` (the factor at the end) and typed options of its own, durations among them arriving as whole steps.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oneloop.basics.duration import Duration, Scale


def constant(step: int, total: int) -> float:
    """The peak rate throughout."""
    return 1.0


def linear(step: int, total: int, *, final: float = 0.0) -> float:
    """From the peak in a straight line to ``final``."""
    return 1.0 + (final - 1.0) * step / total


def cosine(step: int, total: int, *, final: float = 0.0) -> float:
    """Half a cosine from the peak to ``final`` (Loshchilov & Hutter 2017, without restarts)."""
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * step / total))


def wsd(step: int, total: int, *, final: float = 0.0, decay: Duration = Duration("20%")) -> float:
    """Warm-up, stable, decay: the peak, then linearly to ``final`` (Hu et al. 2024, MiniCPM).

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        final: factor at the end.
        decay: duration of the decay at the end of the run.
    """
    length = min(decay, total) if isinstance(decay, int) else total  # a Duration only outside a run
    return 1.0 if step < total - length else linear(step - (total - length), length, final=final)


def plateau(step: int, total: int, *, reductions: int = 0, factor: float = 0.1, patience: int = 3) -> float:
    """The peak, multiplied by ``factor`` whenever ``patience`` evaluations in a row brought no better result.

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        reductions: how often the rate was reduced so far; counted by the run.
        factor: what the rate is multiplied by.
        patience: evaluations to wait.
    """
    return factor**reductions


@dataclass(frozen=True)
class LearningRate:
    """``rate(step)``: the learning rate of the update that makes ``step`` into ``step + 1``."""

    peak: float
    warmup: int
    total: int
    factor: Callable[..., float]
    options: Mapping[str, Any]

    def __call__(self, step: int, *, reductions: int = 0) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        state = {"reductions": reductions} if self.follows_evaluation else {}
        after = max(1, self.total - self.warmup)
        return self.peak * self.factor(step - self.warmup, after, **self.options, **state)

    @property
    def follows_evaluation(self) -> bool:
        return self.factor is plateau

    @property
    def patience(self) -> int:
        """Evaluations without a better result before the rate is reduced (0: it never is)."""
        return int(self.options["patience"]) if self.follows_evaluation else 0


def learning_rate(
    factor: Callable[..., float],
    peak: float,
    *,
    warmup: Duration,
    final: float,
    options: Mapping[str, Any],
    scale: Scale,
    total: int,
) -> LearningRate:
    """The learning rate of a run of ``total`` steps; durations become steps here, once.

    Raises:
        ValueError: the warm-up, or a duration of the schedule, is longer than the run.
    """
    steps = warmup.steps(scale, total=total, key="schedule.warmup")
    if steps > total:
        raise ValueError(f"schedule.warmup {warmup} is {steps} steps, and the whole run has {total}; shorten it")
    given = {
        name: value.steps(scale, total=total, key=f"schedule.{name}") if isinstance(value, Duration) else value
        for name, value in options.items()
    }
    for name, value in options.items():
        if isinstance(value, Duration) and given[name] > total - steps:
            room = f"the run has {total - steps} after a warm-up of {steps}"
            raise ValueError(f"schedule.{name} {value} is {given[name]} steps, and {room}; shorten one of them")
    if "final" in inspect.signature(factor).parameters:
        given["final"] = final
    return LearningRate(peak, steps, total, factor, given)
