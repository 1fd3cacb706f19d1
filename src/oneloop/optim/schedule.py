"""The learning rate as a pure function of the step, so that a checkpoint need not save it.

A schedule is a function ``(step, total) -> factor`` of the peak rate; both count from the end of
the warm-up. It may also take ``final`` (the factor at the end) and typed options; durations are
passed as whole steps.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oneloop.basics.duration import Duration, Scale


def constant(step: int, total: int) -> float:
    """Keep the peak rate."""
    return 1.0


def linear(step: int, total: int, *, final: float = 0.0) -> float:
    """Decrease linearly from the peak to ``final``."""
    return 1.0 + (final - 1.0) * step / total


def cosine(step: int, total: int, *, final: float = 0.0) -> float:
    """Decrease along half a cosine from the peak to ``final`` (Loshchilov & Hutter 2017, without
    restarts)."""
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * step / total))


def wsd(step: int, total: int, *, final: float = 0.0, decay: Duration = Duration("20%")) -> float:
    """Warm-up, stable, decay: keep the peak, then decrease linearly to ``final`` (Hu et al. 2024,
    MiniCPM).

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        final: factor at the end.
        decay: duration of the decay at the end of the run.
    """
    # a Duration if called outside a run
    length = min(decay, total) if isinstance(decay, int) else total
    return 1.0 if step < total - length else linear(step - (total - length), length, final=final)


def plateau(
    step: int, total: int, *, reductions: int = 0, factor: float = 0.1, patience: int = 3
) -> float:
    """Multiply the rate by ``factor`` whenever ``patience`` evaluations in a row do not improve the
    best result.

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        reductions: number of reductions so far; the run counts them.
        factor: factor of the rate at each reduction.
        patience: evaluations without improvement before a reduction.
    """
    return factor**reductions


@dataclass(frozen=True)
class LearningRate:
    """``rate(step)`` is the learning rate of the update from ``step`` to ``step + 1``."""

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
        """Evaluations without improvement before the rate is reduced (0: never)."""
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
    """Build the learning rate of a run of ``total`` steps; convert all durations to steps. Raise
    ValueError if the warm-up, or a duration of the schedule, is longer than the run."""
    steps = warmup.steps(scale, total=total, key="schedule.warmup")
    if steps > total:
        raise ValueError(
            f"schedule.warmup {warmup} is {steps} steps, and the whole run has {total}; shorten it"
        )
    given = {
        name: value.steps(scale, total=total, key=f"schedule.{name}")
        if isinstance(value, Duration)
        else value
        for name, value in options.items()
    }
    for name, value in options.items():
        if isinstance(value, Duration) and given[name] > total - steps:
            room = f"the run has {total - steps} after a warm-up of {steps}"
            raise ValueError(
                f"schedule.{name} {value} is {given[name]} steps, and {room}; shorten one of them"
            )
    if "final" in inspect.signature(factor).parameters:
        given["final"] = final
    return LearningRate(peak, steps, total, factor, given)
