"""What a recipe says in durations, converted to steps: intervals and the learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass

from oneloop.basics.duration import Duration, Scale, is_time
from oneloop.optim.schedule import LearningRate, learning_rate
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import Recipe
from oneloop.recipe.training_keys import OptimizerConfig


@dataclass(frozen=True)
class Intervals:
    """Intervals in steps of log, eval and save.

    Those of check (replicas) and collect (garbage) are there only if they are enabled.
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

    def __contains__(self, name: str) -> bool:
        return name in self.every


def intervals_of(recipe: Recipe, scale: Scale, total: int) -> Intervals:
    """Return the intervals of a recipe.

    Args:
        recipe: its groups log, eval, save, machine and debug apply.
        scale: of its durations.
        total: steps of the run.
    """

    def steps(every: Duration, key: str) -> int:
        return every.steps(scale, total=total, key=key)

    save = recipe.save.every
    seconds = float("inf")
    every = {
        "log": max(1, steps(recipe.log.every, "log.every")),
        "eval": steps(recipe.eval.every, "eval.every"),
        "save": 0,
    }
    if save.unit != "seconds":
        every["save"] = steps(save, "save.every")
    elif save.amount:
        seconds = float(save.amount)
    if recipe.machine.check_every.amount:
        every["check"] = steps(recipe.machine.check_every, "machine.check_every")
    if recipe.machine.gc_every.amount:
        every["collect"] = steps(recipe.machine.gc_every, "machine.gc_every")
    forever = steps(recipe.save.forever, "save.forever")
    if recipe.debug.dry_run:
        total = 1
    return Intervals(every, total, seconds, forever)


def rate_of(recipe: Recipe, scale: Scale, total: int) -> LearningRate:
    """Return the learning rate of a recipe by step; arguments as for :func:`intervals_of`."""
    schedule = recipe.schedule
    return learning_rate(
        resolve("schedule", schedule.name),
        peak(recipe.optimizer, recipe.batch.size),
        warmup=schedule.warmup,
        final=schedule.final,
        options=schedule.options,
        scale=scale,
        total=total,
    )


def peak(optimizer: OptimizerConfig, batch: int) -> float:
    """Return the peak learning rate for a batch size.

    It grows linearly with the batch (Goyal et al. 2017), or with its square root (Malladi et al.
    2022)."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)
