"""Which old checkpoints are kept, and which are deleted."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Keep:
    """The checkpoints that a prune keeps: the newest, those of every Mth step, and the best."""

    newest: int = 2  # how many, at least 1
    every: int = 0  # in steps; 0: none
    best: int | None = None  # step of the best checkpoint

    def among(self, steps: Sequence[int]) -> set[int]:
        """Return those of the steps, in ascending order, whose checkpoints are kept."""
        kept = {
            step for step in steps if (self.every and step % self.every == 0) or step == self.best
        }
        return kept | set(steps[-max(1, self.newest) :])
