"""The learning rate as a pure function of the step, so that a checkpoint need not save it.

A schedule is a function ``(step, total) -> factor`` of the peak rate; both count from the end of
the warm-up. It may also take ``final`` (the factor at the end) and typed options; durations are
passed as whole steps. Or it is a scheduler of torch or transformers, which takes an optimizer.

>>> rate = learning_rate(cosine, 3e-4, warmup=Duration("10%"), scale=Scale(batch, epoch), total=100)
>>> for step in range(100):
...     set_lr(optimizer, rate(step))                # of oneloop.optim.optimizers
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


MOMENTUM_KEYS = ("momentum", "betas")  # options of optimizers


class Scheduler:
    """A scheduler of torch or transformers, stepped on an optimizer without tensors.

    What it sets is a function of the step, although such a scheduler counts: to go back, a new one
    is stepped from 0. A resume does that, too, so its rates are bit-identical.

    Args:
        kind: class of the scheduler, or function that returns one, of an optimizer.
        arguments: its other arguments.
        lr: learning rate of the optimizer.
    """

    def __init__(self, kind: Callable[..., Any], arguments: Mapping[str, Any], lr: float) -> None:
        self._kind = kind
        self._arguments = arguments
        self._lr = lr
        self._restart()

    def _restart(self) -> None:
        from torch.optim import SGD  # a recipe is read without torch

        optimizer = SGD([{"params": []}], lr=self._lr, momentum=0.9)
        self._scheduler = self._kind(optimizer=optimizer, **self._arguments)
        optimizer.step()  # torch warns if the scheduler's first step comes before it
        self._group = optimizer.param_groups[0]
        self._step = 0
        self.cycles_momentum = getattr(self._scheduler, "cycle_momentum", False)

    def at(self, step: int) -> Mapping[str, Any]:
        """Return the optimizer's parameter group at a step; some microseconds for the next one.

        OneCycleLR, which has no step after its last one, stays there.
        """
        end = getattr(self._scheduler, "total_steps", None)
        if end is not None:
            step = min(step, end - 1)
        if step < self._step:
            self._restart()
        for _ in range(self._step, step):
            self._scheduler.step()
        self._step = step
        return self._group


@dataclass(frozen=True)
class LearningRate:
    """``rate(step)`` is the learning rate of the update from ``step`` to ``step + 1``."""

    peak: float
    warmup: int  # steps
    length: int  # steps of the schedule after the warm-up
    factor: Callable[..., float] | Scheduler  # the schedule
    options: Mapping[str, Any]  # of a function
    warmup_start: float | None = None  # factor at the first step of the warm-up
    warmup_offset: int = 0  # steps that are added to the divisor of the warm-up

    def __call__(self, step: int, *, reductions: int = 0) -> float:
        if step < self.warmup and self.warmup_start is None:
            return self.peak * ((step + 1) / (self.warmup + self.warmup_offset))
        if step < self.warmup:
            start = self.warmup_start or 0.0
            return self.peak * (start + (1.0 - start) * step / self.warmup)
        since = self._since(step)
        if isinstance(self.factor, Scheduler):
            return float(self.factor.at(since)["lr"])
        if self.factor is plateau:
            return self.peak * plateau(since, self.length, **self.options, reductions=reductions)
        return self.peak * self.factor(since, self.length, **self.options)

    def _since(self, step: int) -> int:
        """Return the step of the schedule, which starts after the warm-up and may end early."""
        return min(max(0, step - self.warmup), self.length)

    def momentum(self, step: int) -> float | None:
        """Return the momentum of the update from ``step``; None: the optimizer's own."""
        if not isinstance(self.factor, Scheduler) or not self.factor.cycles_momentum:
            return None
        return float(self.factor.at(self._since(step))["momentum"])

    @property
    def scheduled(self) -> tuple[str, ...]:
        """Return the names of the entries of parameter groups that it sets."""
        cycles_momentum = getattr(self.factor, "cycles_momentum", False)
        return ("lr", *MOMENTUM_KEYS) if cycles_momentum else ("lr",)

    @property
    def patience(self) -> int:
        """Evaluations without improvement before the rate is reduced (0: never)."""
        return int(self.options["patience"]) if self.factor is plateau else 0


def learning_rate(
    factor: Callable[..., Any],
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
    """Build the learning rate of a run, with all durations in steps, rounded up.

    Args:
        factor: the schedule: a function, or a scheduler of torch or transformers.
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
    if steps > end:
        raise ValueError(
            f"schedule.warmup {warmup} is {steps} steps, and {whole} has {end}; shorten it"
        )

    # Complete the arguments, and convert durations to steps.
    parameters = inspect.signature(factor).parameters
    arguments = dict(options or {})
    if "final" in parameters:
        arguments["final"] = final
    elif final:
        raise ValueError(
            f"schedule.final {final:g} has no effect, because the schedule {factor.__name__} takes "
            "no argument final; set schedule.final 0, or add this argument"
        )
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty and name != "reductions":
            arguments.setdefault(name, parameter.default)
    for name, value in arguments.items():
        key = f"schedule.{name}"
        arguments[name] = _in_steps(key, value, scale, total)
        is_duration = isinstance(value, Duration) and "optimizer" not in parameters
        if is_duration and arguments[name] > end - steps:
            raise ValueError(
                f"{key} {value} is {arguments[name]} steps, and {whole} has {end - steps} after a "
                f"warm-up of {steps}; shorten one of them"
            )
    after_warmup = max(1, end - steps)

    # A scheduler takes an optimizer. It begins at the peak, or warms up by itself.
    if "optimizer" in parameters:
        scheduler = _scheduler(factor, arguments, peak, after_warmup)
        first = scheduler.at(0)["lr"]
        if steps and first != peak:
            raise ValueError(
                f"schedule.warmup {warmup} has no effect with {factor.__name__}, which begins at "
                f"{first:g} and warms up by itself; remove schedule.warmup"
            )
        return LearningRate(peak, steps, after_warmup, scheduler, {}, warmup_start, warmup_offset)

    # Try it at both ends: a function may be anybody's.
    rate = LearningRate(peak, steps, after_warmup, factor, arguments, warmup_start, warmup_offset)
    for step in (steps, total - 1):
        try:
            value = float(rate(step))
        except Exception as error:
            raise ValueError(
                f"schedule.name: the function failed at step {step}: {type(error).__name__}: "
                f"{error}"
            ) from error
        if not 0.0 <= value < math.inf:
            raise ValueError(
                f"schedule.name: the learning rate of step {step} would be {value:g}; a schedule "
                "must return a finite factor that is not negative"
            )
    return rate


def _in_steps(key: str, value: Any, scale: Scale, total: int) -> Any:
    """Return an argument, or a list of them, with durations in whole steps."""
    if isinstance(value, list | tuple):
        return [_in_steps(key, item, scale, total) for item in value]
    return value.steps(scale, total=total, key=key) if isinstance(value, Duration) else value


def _scheduler(
    kind: Callable[..., Any], options: Mapping[str, Any], peak: float, total: int
) -> Scheduler:
    """Build a scheduler. Arguments for the peak and for the end may be left out.

    Args:
        kind: class of the scheduler, or function that returns one.
        options: arguments of the recipe, in steps.
        peak: the largest rate.
        total: steps after the warm-up.

    Raises:
        ValueError: the scheduler rejects its arguments, or it cannot be used in a run.
    """
    name = kind.__name__
    if name == "ReduceLROnPlateau":
        raise ValueError(
            "schedule.name ReduceLROnPlateau needs the results of evaluations; use schedule.name "
            "plateau, with schedule.factor and schedule.patience"
        )

    # Defaults count as left out, because the recipe was completed.
    parameters = inspect.signature(kind).parameters
    arguments = {}
    for key, value in options.items():
        if key not in parameters or value != parameters[key].default:
            arguments[key] = value

    # The run has a peak and an end, unless the options give the end in another form.
    run = {"max_lr": peak, "T_max": total}
    if "epochs" not in arguments:
        run["total_steps"] = total
    if "num_stable_steps" not in arguments:
        run["num_training_steps"] = total
    if name == "PolynomialLR":
        run["total_iters"] = total
    for key in run.keys() & parameters.keys():
        arguments.setdefault(key, run[key])
    try:
        return Scheduler(kind, arguments, peak)
    except Exception as error:
        raise ValueError(
            f"schedule.name {name} cannot be used: {error}; its arguments are keys (schedule.NAME)"
        ) from error
