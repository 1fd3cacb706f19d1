"""Checkpoints that the training process writes itself, like those of a trial of an optimizer."""

from __future__ import annotations

from typing import Any

from oneloop.checkpoint.checkpoints import Checkpoints


def write_in_the_trainer() -> None:
    """Let this process write its checkpoints, and wait for them."""
    made = Checkpoints.__init__

    def synchronous(self: Checkpoints, *given: Any, **more: Any) -> None:
        made(self, *given, **{**more, "sync": True})

    Checkpoints.__init__ = synchronous
