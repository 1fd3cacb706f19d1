"""The learning rate as a pure function of the step, so that a checkpoint need not save it.

A schedule is a function ``(step, total) -> factor`` of the peak rate; both count from the end of
the warm-up. It may also take ``final`` (the factor at the end) and typed options; durations are
passed as whole steps.

>>> rate = learning_rate(cosine, 3e-4, warmup=Duration("10%"), scale=Scale(batch, epoch), total=100)
>>> for step in range(100):
...     set_lr(optimizer, rate(step))                # of oneloop.optim.optimizers
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

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


def step(
    step: int,
    total: int,
    *,
    every: Duration | None = None,
    milestones: tuple[Duration, ...] = (),
    factor: float = 0.1,
) -> float:
    """Multiply the rate by ``factor`` at regular intervals, or at milestones.

    (As torch's StepLR and MultiStepLR.)

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        every: duration between two reductions (30ep, 30%).
        milestones: durations after the warm-up until each reduction, instead of every (30ep, 60ep).
        factor: factor of the rate at each reduction.
    """
    _require("factor", factor, above=0.0)
    if (every is None) == (not milestones):
        raise ValueError(
            "schedule.name step needs schedule.every (30ep) or schedule.milestones ([30ep,60ep]), "
            f"got {every} and {list(milestones)}; set one of them"
        )
    if milestones:
        reductions = sum(step >= _steps(milestone) for milestone in milestones)
    else:
        _require("every", _steps(every), above=0)
        reductions = int(step // _steps(every))
    return float(factor**reductions)


def exponential(
    step: int, total: int, *, every: Duration = Duration("1ep"), factor: float = 0.95
) -> float:
    """Decrease exponentially, by ``factor`` in each interval.

    (As torch's ExponentialLR, but continuously; for one reduction per interval see :func:`step`.)

    Args:
        step: steps since the warm-up.
        total: steps of the run after the warm-up.
        every: duration in which the rate is multiplied by factor.
        factor: factor of the rate in that duration.
    """
    _require("factor", factor, above=0.0)
    _require("every", _steps(every), above=0)
    return float(factor ** float(step / _steps(every)))


MOMENTUM_KEYS = ("momentum", "betas")  # options of optimizers
_MOMENTA = (0.85, 0.95)  # of torch's OneCycleLR, at the peak and at the ends


def onecycle(
    step: int,
    total: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    three_phase: bool = False,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    cycle_momentum: bool = True,
    base_momentum: float = _MOMENTA[0],
    max_momentum: float = _MOMENTA[1],
) -> float:
    """Increase to the peak, then decrease far below the start, while the momentum does the reverse.

    (Smith & Topin 2018, as torch's OneCycleLR.)

    Args:
        step: steps since the start.
        total: steps of the cycle.
        pct_start: share of the cycle in which the rate increases.
        anneal_strategy: form of both parts, half a cosine or a line.
        three_phase: return to the first rate in as many steps as the increase took, and then
            decrease.
        div_factor: peak divided by the first rate.
        final_div_factor: first rate divided by the last one.
        cycle_momentum: change the momentum (Adam's first beta), too.
        base_momentum: momentum at the peak.
        max_momentum: momentum at the start and at the end.
    """
    _require("div_factor", div_factor, above=0.0)
    _require("final_div_factor", final_div_factor, above=0.0)
    most = 0.5 if three_phase else 1.0  # the second of three phases is as long as the first
    if not 0.0 <= pct_start <= most:
        raise ValueError(
            f"schedule.pct_start must be from 0 to {most:g} with schedule.three_phase "
            f"{str(three_phase).lower()}, got {pct_start}"
        )
    if not 0.0 <= base_momentum <= max_momentum < 1.0:
        raise ValueError(
            "onecycle requires 0 <= schedule.base_momentum <= schedule.max_momentum < 1, got "
            f"{base_momentum} and {max_momentum}"
        )
    if not cycle_momentum and (base_momentum, max_momentum) != _MOMENTA:
        raise ValueError(
            f"schedule.base_momentum {base_momentum} and schedule.max_momentum {max_momentum} have "
            "no effect with schedule.cycle_momentum false; remove them"
        )
    first = 1.0 / div_factor
    last = first / final_div_factor
    values = (first, 1.0, first, last) if three_phase else (first, 1.0, last)
    return _annealed(step, _ends(total, pct_start, len(values)), values, anneal_strategy)


def _ends(total: int, pct_start: float, values: int) -> list[float]:
    """Return the step at which each value of a cycle is reached, as torch's OneCycleLR."""
    peak = pct_start * total - 1.0
    last = total - 1.0
    if values == 3:
        return [0.0, peak, last]
    return [0.0, peak, 2.0 * peak, last]


def _annealed(step: int, ends: Sequence[float], values: Sequence[float], form: str) -> float:
    """Return the value at a step.

    Args:
        step: from 0.
        ends: steps at which the values are reached.
        values: one for each end.
        form: of the ways between them: cos (half a cosine) or linear.
    """
    for (start, end), (before, after) in zip(pairwise(ends), pairwise(values), strict=True):
        if step > end:
            continue
        share = (step - start) / (end - start) if end > start else 1.0
        if form == "linear":
            return before + (after - before) * share
        return after + (before - after) / 2.0 * (1.0 + math.cos(math.pi * share))
    return values[-1]


def _steps(interval: Any) -> Fraction:
    """Return an interval in steps. Outside a run, a Duration must be in steps."""
    if isinstance(interval, Duration):
        interval = interval.exact_steps(Scale(batch=1, epoch=1))
    return Fraction(interval)


def _require(name: str, value: Any, *, above: float) -> None:
    """Raise ValueError if an option of a schedule is too small."""
    if not above < value < math.inf:
        raise ValueError(f"schedule.{name} must be above {above:g} and finite, got {value}")


@dataclass(frozen=True)
class LearningRate:
    """``rate(step)`` is the learning rate of the update from ``step`` to ``step + 1``."""

    peak: float
    warmup: int  # steps
    total: int  # steps of the schedule, with the warm-up
    factor: Callable[..., float]  # the schedule
    options: Mapping[str, Any]  # of the schedule
    warmup_start: float | None = None  # factor at the first step of the warm-up
    warmup_offset: int = 0  # steps that are added to the divisor of the warm-up

    def __call__(self, step: int, *, reductions: int = 0) -> float:
        if step < self.warmup:
            return self.peak * self._warming_up(step)
        after = max(1, self.total - self.warmup)
        since = min(step - self.warmup, after)  # the schedule may end before the run
        if self.follows_evaluation:
            factor = self.factor(since, after, **self.options, reductions=reductions)
        else:
            factor = self.factor(since, after, **self.options)
        return self.peak * factor

    def _warming_up(self, step: int) -> float:
        """Return the factor at a step of the warm-up."""
        if self.warmup_start is None:
            return (step + 1) / (self.warmup + self.warmup_offset)
        return self.warmup_start + (1.0 - self.warmup_start) * step / self.warmup

    def momentum(self, step: int) -> float | None:
        """Return the momentum of the update from ``step``; None: the optimizer's own."""
        if not self.cycles_momentum:
            return None
        high = self.options["max_momentum"]
        low = self.options["base_momentum"]
        values = [high, low, high]
        if self.options["three_phase"]:
            values = [high, low, high, high]
        at = _ends(self.total, self.options["pct_start"], len(values))
        return _annealed(step, at, values, self.options["anneal_strategy"])

    @property
    def scheduled(self) -> tuple[str, ...]:
        """Return the names of the entries of parameter groups that it sets."""
        return ("lr", *MOMENTUM_KEYS) if self.cycles_momentum else ("lr",)

    @property
    def cycles_momentum(self) -> bool:
        """Whether the momentum changes with the rate."""
        return self.factor is onecycle and bool(self.options["cycle_momentum"])

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
    warmup: Duration = Duration(0),
    warmup_start: float | None = None,
    warmup_offset: int = 0,
    length: Duration | None = None,
    final: float = 0.0,
    options: Mapping[str, Any] | None = None,
    scale: Scale,
    total: int,
) -> LearningRate:
    """Build the learning rate of a run, with all durations in steps.

    Args:
        factor: the schedule.
        peak: the largest rate.
        warmup: duration of the linear increase to the peak. At step n of w, the factor is
            (n + 1) / w; or, as below, between warmup_start and 1.
        warmup_start: factor at step 0; at step n, warmup_start + (1 - warmup_start) n / w.
        warmup_offset: steps that are added to w in (n + 1) / w.
        length: duration at the end of which the schedule ends, with the warm-up; None: the run.
        final: factor at the end, for schedules that take it.
        options: other arguments of the schedule.
        scale: converts durations to steps.
        total: steps of the run, with the warm-up.

    Raises:
        ValueError: the warm-up, or a duration of the schedule, is longer than the schedule; a value
            is out of range; or the schedule returns no factor.
    """
    # The warm-up must fit into the schedule.
    end = total if length is None else length.steps(scale, total=total, key="schedule.length")
    whole = "the whole run" if length is None else f"schedule.length {length}"
    steps = warmup.steps(scale, total=total, key="schedule.warmup")
    if end < 1:
        raise ValueError(f"schedule.length {length} must be at least one step")
    if steps and factor is onecycle:
        raise ValueError(
            f"schedule.warmup {warmup} has no effect with schedule.name onecycle, which has "
            "schedule.pct_start; remove it"
        )
    if steps > end:
        raise ValueError(
            f"schedule.warmup {warmup} is {steps} steps, and {whole} has {end}; shorten it"
        )

    # Complete the options, and convert the durations among them.
    arguments = inspect.signature(factor).parameters
    given: dict[str, Any] = {}
    for name, parameter in arguments.items():
        optional = parameter.default is not parameter.empty
        if optional and name not in ("final", "reductions"):
            given[name] = parameter.default
    given |= options or {}
    for name, value in given.items():
        key = f"schedule.{name}"
        if isinstance(value, Duration) and factor in (step, exponential):
            # Whole steps would add up: an epoch may have 28.1 steps.
            given[name] = value.exact_steps(scale, total=total, key=key)
        elif isinstance(value, Duration):
            given[name] = value.steps(scale, total=total, key=key)
            if given[name] > end - steps:
                raise ValueError(
                    f"{key} {value} is {given[name]} steps, and {whole} has {end - steps} "
                    f"after a warm-up of {steps}; shorten one of them"
                )
        elif name == "milestones" and factor is step:
            exact = [Duration(one).exact_steps(scale, total=total, key=key) for one in value]
            given[name] = tuple(exact)
    given |= _final(factor, final)

    # Try it at both ends: a function may be anybody's.
    rate = LearningRate(peak, steps, end, factor, given, warmup_start, warmup_offset)
    _check(rate, steps)
    _check(rate, total - 1)
    return rate


def _final(factor: Callable[..., float], final: float) -> dict[str, float]:
    """Return the argument final, if a schedule takes it; raise ValueError if it has no effect."""
    if "final" in inspect.signature(factor).parameters:
        return {"final": final}
    if final:
        raise ValueError(
            f"schedule.final {final:g} has no effect, because the schedule "
            f"{getattr(factor, '__name__', factor)} takes no argument final; set schedule.final 0, "
            "or add this argument"
        )
    return {}


def _check(rate: LearningRate, step: int) -> None:
    """Raise ValueError if a schedule returns no rate at this step."""
    try:
        value = float(rate(step))
    except ValueError:
        raise
    except OverflowError:
        value = math.inf
    except Exception as error:
        raise ValueError(
            f"schedule.name: the function failed at step {step}: {type(error).__name__}: {error}"
        ) from error
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"schedule.name: the learning rate of step {step} would be {value:g}; a schedule must "
            "return a finite factor that is not negative"
        )
