"""The intervals of a recipe in steps: of log lines, evaluations, saves and checks."""

from collections.abc import Mapping
from dataclasses import dataclass

from oneloop.basics.duration import Duration, Scale, is_time
from oneloop.recipe.schema import Recipe


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
