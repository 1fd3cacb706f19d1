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
    """Decrease along half a cosine from the peak to ``final``.

    (Loshchilov & Hutter 2017, without restarts.)
    """
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * step / total))


def wsd(step: int, total: int, *, final: float = 0.0, decay: Duration = Duration("20%")) -> float:
    """Warm-up, stable, decay: keep the peak, then decrease linearly to ``final``.

    (Hu et al. 2024, MiniCPM.)

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        final: factor at the end.
        decay: duration of the decay at the end of the run.
    """
    # a Duration if called outside a run
    length = min(decay, total) if isinstance(decay, int) else total
    if step < total - length:
        return 1.0
    return linear(step - (total - length), length, final=final)


def plateau(
    step: int, total: int, *, reductions: int = 0, factor: float = 0.1, patience: int = 3
) -> float:
    """Multiply the rate by ``factor`` whenever evaluations do not improve the best result.

    ``patience`` evaluations in a row must not improve it.

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
    warmup: int  # steps
    total: int  # steps of the run, with the warm-up
    factor: Callable[..., float]  # the schedule
    options: Mapping[str, Any]  # of the schedule

    def __call__(self, step: int, *, reductions: int = 0) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        after = max(1, self.total - self.warmup)
        if self.follows_evaluation:
            factor = self.factor(step - self.warmup, after, **self.options, reductions=reductions)
        else:
            factor = self.factor(step - self.warmup, after, **self.options)
        return self.peak * factor

    @property
    def follows_evaluation(self) -> bool:
        """Whether the rate depends on the results of evaluations."""
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
    """Build the learning rate of a run, with all durations in steps.

    Args:
        factor: the schedule.
        peak: the largest rate.
        warmup: duration of the linear increase to the peak.
        final: factor at the end, for schedules that take it.
        options: other arguments of the schedule.
        scale: converts durations to steps.
        total: steps of the run, with the warm-up.

    Raises:
        ValueError: the warm-up, or a duration of the schedule, is longer than the run.
    """
    # The warm-up must fit into the run.
    steps = warmup.steps(scale, total=total, key="schedule.warmup")
    if steps > total:
        raise ValueError(
            f"schedule.warmup {warmup} is {steps} steps, and the whole run has {total}; shorten it"
        )
    # Convert the durations among the options. A schedule gets whole steps.
    given = dict(options)
    for name, value in options.items():
        if isinstance(value, Duration):
            given[name] = value.steps(scale, total=total, key=f"schedule.{name}")
    for name, value in options.items():
        if isinstance(value, Duration) and given[name] > total - steps:
            raise ValueError(
                f"schedule.{name} {value} is {given[name]} steps, and the run has {total - steps} "
                f"after a warm-up of {steps}; shorten one of them"
            )
    if "final" in inspect.signature(factor).parameters:
        given["final"] = final
    return LearningRate(peak, steps, total, factor, given)
