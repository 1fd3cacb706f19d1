"""Build a job from a recipe and check it, before anything is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from oneloop.basics.differences import Texts
from oneloop.basics.duration import Duration, Scale, is_time
from oneloop.basics.seeds import key
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered, checked_order, order_hash
from oneloop.data.step_batches import CollateWithWeight
from oneloop.ema import EMASettings
from oneloop.job.learning_rate import rate_of
from oneloop.job.model import BuiltModel, build_model, torch_dtype
from oneloop.job.optimizer import Tried, optimizer_of
from oneloop.job.task import larger_is_better, make_task, reject_skips
from oneloop.optim.schedule import LearningRate
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.generated import check_generates
from oneloop.task_protocol.protocol import Task, check_sets
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import is_whole_batch

_LOG = 50  # steps between log lines with log.every auto, at most
_LINES = 40  # log lines of a shorter run, at least
_GROWTH = 3  # length of an early interval with one repeat, in multiples of its first log line
_GARBAGE = 1000  # steps between Python's garbage collections, the same on all processes


@dataclass(frozen=True)
class Intervals:
    """Intervals in steps of log, eval, save and collect (garbage).

    That of check (replicas) is there only if it is enabled.
    """

    every: Mapping[str, int]
    total: int  # steps of the run; everything is due at the last step
    save_seconds: float = float("inf")  # also between saves
    forever: int = 0  # steps between checkpoints that are never deleted (0: none)

    def due(self, step: int, *, save: bool = False) -> list[str]:
        """Return the actions that are due after this step, in execution order.

        ``save``: whether the time for a save has come."""
        return [
            name
            for name, every in self.every.items()
            if is_time(step, every, self.total) or (save and name == "save")
        ]

    def is_due(self, name: str, step: int) -> bool:
        return is_time(step, self.every[name], self.total)

    def is_repeated(self, step: int, *, seed: int) -> bool:
        """Return whether to repeat a micro-batch of this step: at some log lines, and at the end.

        There is one in each interval of log lines: early often, and at last every
        ``machine.check_every`` steps.
        """
        if not self.is_due("log", step):
            return False
        line = step // self.every["log"]
        longest = max(1, self.every["check"] // self.every["log"])

        # Find the interval of this log line.
        start = 1
        length = min(longest, _GROWTH)
        while line >= start + length:
            start += length
            length = min(longest, _GROWTH * start)
        return step >= self.total or line == start + key(seed, start) % length


@dataclass(frozen=True)
class Job:
    """Everything that one run trains with; all durations are in steps."""

    recipe: Recipe
    task: Task
    train_set: Any
    eval_sets: dict[str, Any]
    built: BuiltModel
    # builds the recipe's optimizer for a prepared model
    make_optimizer: Callable[[nn.Module], Optimizer]
    tried: Tried  # what a trial of the optimizer on a small model has found out
    emas: list[EMASettings]
    layout: BatchLayout
    order: Ordered
    collate: CollateWithWeight
    intervals: Intervals
    rate: LearningRate
    upward: bool  # whether a larger value of the eval.best metric is better
    noise_scale: bool  # whether the run measures the gradient noise scale
    # what identifies recipe, code, model and data, once a run has prepared them
    inputs: Texts = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.built.model

    def order_hash(self, position: int = 0) -> str | None:
        """Return a hash of an order that the data set defines, also of the step at a position."""
        if not hasattr(self.train_set, "order"):
            return None
        return order_hash(self.order, len(self.train_set), self.layout.size, position=position)

    @property
    def sets(self) -> dict[str, Any]:
        """Training and evaluation data sets by name."""
        return {"train": self.train_set, **self.eval_sets}

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.intervals.total

    @property
    def checkpoints_kept(self) -> int:
        """Largest number of checkpoints at once, without those of ``save.forever``."""
        save = self.recipe.save
        every = self.intervals.every["save"]  # in steps
        if not every:
            every = 1 if save.every.unit == "seconds" else self.steps
        return min(save.keep + save.best + 1, 1 + self.steps // max(1, every))

    @property
    def unit(self) -> str:
        """Unit of the batch weight: samples or tokens."""
        return getattr(self.task, "unit", "samples")

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.recipe)

    @property
    def exact(self) -> bool:
        """Whether the run must be bit-identical on every parallel layout (``batch.grain``)."""
        return self.layout.grain is not None


def build_job(
    recipe: Recipe,
    *,
    ranks: int,
    sharded: bool = False,
    device: str = "cpu",
    micro: Any = None,
    on_meta: bool = False,
) -> Job:
    """Build the job of a recipe.

    Args:
        recipe: what to train.
        ranks: number of processes.
        sharded: whether FSDP2 shards the model.
        device: type of the device.
        micro: micro-batch size if ``batch.micro`` is not a number, but auto or fastest.
        on_meta: build without memory for the weights, if the task can build its model so.

    Raises:
        ValueError: bad input.
    """
    # Divide the batch among ranks and micro-batches.
    if isinstance(recipe.batch.micro, int):
        micro = recipe.batch.micro
    layout = BatchLayout(recipe.batch.size, ranks, micro, grain=recipe.batch.grain, sharded=sharded)

    # Create the task and its data sets.
    task = make_task(recipe)
    train_set = theirs(task, "train_set", task.train_set)
    eval_sets = theirs(task, "eval_sets", task.eval_sets)
    check_sets(train_set, eval_sets)
    if recipe.save.final == "best" and not set(eval_sets) - {"test"}:
        raise ValueError("save.final best requires a validation set; the task has none")
    opened = [train_set, *eval_sets.values()]

    # Order the samples.
    order_of = partial(
        checked_order, seed=recipe.seed, batch=recipe.batch.size, shuffle=recipe.data.shuffle
    )
    order = order_of(train_set)
    few = recipe.debug.overfit
    if few and hasattr(order, "copies"):
        raise ValueError(
            f"debug.overfit {few} cannot be combined with repeated samples: a step has "
            f"{order.copies} copies of each; remove debug.overfit, or set task.repeats 1"
        )
    if few:
        train_set = Subset(train_set, range(min(few, len(train_set))))
        order = order_of(train_set)

    # Convert durations to steps. Those in tokens need samples of equal weight.
    sample_weight = getattr(task, "sample_weight", None)
    tokens = sample_weight if getattr(task, "unit", "samples") == "tokens" else None
    scale = Scale(layout.size, len(train_set), tokens)
    total = recipe.duration.steps(scale)
    emas = _emas(recipe, scale, total)
    if recipe.eval.generate:
        check_generates(task, eval_sets)
    upward = larger_is_better(recipe.eval, task, eval_sets, [ema.name for ema in emas])
    if total < 1:
        raise ValueError(f"duration {recipe.duration} is shorter than one step; the minimum is 1")

    # Build the model, and try the optimizer on a small one.
    collate = CollateWithWeight(
        task.collate, task.weight, sample_weight=sample_weight, dtype=torch_dtype(recipe)
    )
    built = build_model(recipe, task, layout, sharded=sharded, device=device, on_meta=on_meta)
    reject_skips(task, opened, built.model)
    rate = rate_of(recipe, scale, total)
    make_optimizer, tried = optimizer_of(recipe, built, rate)

    # Is the noise scale measured? Its formula needs several parts in a step, independent samples,
    # and a loss that is a sum over samples.
    parts = ranks
    if layout.grain or not sharded:
        parts *= layout.accumulate
    independent = recipe.data.shuffle and not hasattr(order, "copies")
    return Job(
        recipe=recipe,
        task=task,
        train_set=train_set,
        eval_sets=eval_sets,
        built=built,
        make_optimizer=make_optimizer,
        tried=tried,
        emas=emas,
        layout=layout,
        order=order,
        collate=collate,
        intervals=_intervals(recipe, scale, total),
        rate=rate,
        upward=upward,
        noise_scale=parts > 1 and independent and not is_whole_batch(task),
    )


def _emas(recipe: Recipe, scale: Scale, total: int) -> list[EMASettings]:
    """Return the settings of each EMA."""
    ema = recipe.ema
    settings = partial(EMASettings, every=ema.every, buffers=ema.buffers, device=ema.device)
    emas = []
    for duration in ema.half_lives:
        half_life = duration.samples(scale, total=total, key="ema.half_life")
        name = f"ema-{duration.text}".replace(" ", "")
        emas.append(settings(half_life=half_life, name=name))
    if ema.decay:
        start = None
        if ema.start is not None:
            start = ema.start.steps(scale, total=total, key="ema.start")
            if start + 1 >= total:
                raise ValueError(
                    f"ema.start {ema.start} is {start} steps of {total}: the EMA would be a "
                    "copy of the weights in the whole run; shorten it"
                )
        name = f"ema-{ema.decay}"
        warmup = ema.warmup_power
        emas.append(settings(decay=ema.decay, start=start, warmup_power=warmup, name=name))
    for width in ema.power:
        emas.append(settings(power=width, name=f"ema-power-{width}"))
    if len(emas) == 1 and not ema.power:
        emas = [replace(emas[0], name="ema")]

    names = [one.name for one in emas]
    if len(set(names)) < len(names):
        raise ValueError(f"ema: duplicate EMAs in {', '.join(names)}; remove one")
    return emas


def _intervals(recipe: Recipe, scale: Scale, total: int) -> Intervals:
    """Return the intervals of a recipe.

    Args:
        recipe: its groups log, eval, save, machine and debug apply.
        scale: of its durations.
        total: steps of the run.
    """
    steps = partial(Duration.steps, scale=scale, total=total)

    # A function of the run's length alone: a resumed run logs at the same steps.
    log = recipe.log.every
    if isinstance(log, Duration):
        between = steps(log, key="log.every")
    else:
        between = min(_LOG, total // _LINES)

    save = recipe.save.every
    timed = save.unit == "seconds"
    seconds = float(save.amount) if timed and save.amount else float("inf")
    every = {
        "log": max(1, between),
        "eval": steps(recipe.eval.every, key="eval.every"),
        "save": 0 if timed else steps(save, key="save.every"),
        "collect": _GARBAGE,
    }
    if recipe.machine.check_every.amount:
        every["check"] = steps(recipe.machine.check_every, key="machine.check_every")
    forever = steps(recipe.save.forever, key="save.forever")
    if recipe.debug.dry_run:
        total = 1
    return Intervals(every, total, seconds, forever)
