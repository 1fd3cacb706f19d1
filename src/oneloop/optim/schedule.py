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
from collections.abc import Callable, Mapping, Sequence
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
    total: int  # steps of the schedule, with the warm-up
    factor: Callable[..., float] | Scheduler  # the schedule
    options: Mapping[str, Any]  # of a function
    warmup_start: float | None = None  # factor at the first step of the warm-up
    warmup_offset: int = 0  # steps that are added to the divisor of the warm-up
    notes: Sequence[str] = ()  # sentences for the user

    def __call__(self, step: int, *, reductions: int = 0) -> float:
        if step < self.warmup:
            return self.peak * self._warming_up(step)
        if isinstance(self.factor, Scheduler):
            return float(self.factor.at(self._since(step))["lr"])
        since = self._since(step)
        if self.factor is plateau:
            factor = plateau(since, self._length, **self.options, reductions=reductions)
        else:
            factor = self.factor(since, self._length, **self.options)
        return self.peak * factor

    def _warming_up(self, step: int) -> float:
        """Return the factor at a step of the warm-up."""
        if self.warmup_start is None:
            return (step + 1) / (self.warmup + self.warmup_offset)
        return self.warmup_start + (1.0 - self.warmup_start) * step / self.warmup

    @property
    def _length(self) -> int:
        """Steps of the schedule after the warm-up."""
        return max(1, self.total - self.warmup)

    def _since(self, step: int) -> int:
        """Return the step of the schedule, which starts after the warm-up and may end early."""
        return min(max(0, step - self.warmup), self._length)

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
    """Build the learning rate of a run, with all durations in steps.

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
    arguments: dict[str, Any] = _final(factor, final) | dict(options or {})

    # A scheduler takes an optimizer. It begins at the peak, or has a warm-up of its own.
    if "optimizer" in inspect.signature(factor).parameters:
        notes: list[str] = []
        for name, value in arguments.items():
            arguments[name] = _whole_steps(f"schedule.{name}", value, scale, total, notes)
        scheduler = _scheduler(factor, arguments, peak, max(1, end - steps))
        first = scheduler.at(0)["lr"]
        if steps and first != peak:
            raise ValueError(
                f"schedule.warmup {warmup} has no effect with {factor.__name__}, which begins at "
                f"{first:g} and has a warm-up of its own; remove schedule.warmup"
            )
        return LearningRate(peak, steps, end, scheduler, {}, warmup_start, warmup_offset, notes)

    # Complete the options of a function, and convert the durations among them.
    for name, parameter in inspect.signature(factor).parameters.items():
        if parameter.default is not parameter.empty and name != "reductions":
            arguments.setdefault(name, parameter.default)
        value = arguments.get(name)
        if isinstance(value, Duration):
            key = f"schedule.{name}"
            arguments[name] = value.steps(scale, total=total, key=key)
            if arguments[name] > end - steps:
                raise ValueError(
                    f"{key} {value} is {arguments[name]} steps, and {whole} has {end - steps} "
                    f"after a warm-up of {steps}; shorten one of them"
                )

    # Try it at both ends: a function may be anybody's.
    rate = LearningRate(peak, steps, end, factor, arguments, warmup_start, warmup_offset)
    _check(rate, steps)
    _check(rate, total - 1)
    return rate


def _whole_steps(key: str, value: Any, scale: Scale, total: int, notes: list[str]) -> Any:
    """Return an option, or a list, with durations in whole steps; note each one rounded up."""
    if isinstance(value, list | tuple):
        return [_whole_steps(key, item, scale, total, notes) for item in value]
    if not isinstance(value, Duration):
        return value
    exact = value.exact_steps(scale, total=total, key=key)
    steps = math.ceil(exact)
    if steps != exact:
        notes.append(f"{key} {value} is {float(exact):.6g} steps, rounded up to {steps}")
    return steps


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

    # The run has a peak and an end, unless the options give the end in another form.
    run = {"max_lr": peak, "T_max": total}
    if options.get("epochs") is None:
        run["total_steps"] = total
    if options.get("num_stable_steps") is None:
        run["num_training_steps"] = total
    if name == "PolynomialLR":
        run["total_iters"] = total
    parameters = inspect.signature(kind).parameters
    arguments = {key: value for key, value in run.items() if key in parameters}
    for key, value in options.items():
        if key in parameters and value == parameters[key].default:
            continue  # left out; the recipe was completed
        if key.startswith(("base_", "max_")) and isinstance(value, list):
            raise ValueError(
                f"schedule.{key} {value} is a list for parameter groups; give one number, and the "
                "lr_factor of each group in optimizer.groups"
            )
        arguments[key] = value
    try:
        return Scheduler(kind, arguments, peak)
    except Exception as error:
        raise ValueError(
            f"schedule.name {name} cannot be used: {error}; its arguments are keys (schedule.NAME)"
        ) from error


def _final(factor: Callable[..., float], final: float) -> dict[str, Any]:
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
