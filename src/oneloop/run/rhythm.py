"""When each kind of rare work is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oneloop.basics.duration import is_time


@dataclass(frozen=True)
class Rhythm:
    """Steps between two of each kind: log, eval and save; check and collect where they are wanted."""

    every: Mapping[str, int]
    total: int
    """steps of the run: at the last one all is due"""
    forever: int = 0
    """steps between two checkpoints that are never deleted (0: none)"""

    def due(self, step: int) -> list[str]:
        """What is due after this step, in the order in which it is done."""
        return [name for name, every in self.every.items() if is_time(step, every, self.total)]

    def is_due(self, name: str, step: int) -> bool:
        return is_time(step, self.every[name], self.total)

    def __contains__(self, name: str) -> bool:
        return name in self.every
