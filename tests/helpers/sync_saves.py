"""Checkpoints that the training process writes itself, for tests of what they hold."""

from __future__ import annotations

from typing import Any

import torch

from oneloop.checkpoint import writer
from oneloop.checkpoint.background_save import BackgroundSaves
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.pieces import Piece, stage
from oneloop.checkpoint.save_request import SaveRequest

_save = Checkpoints.save


def _begin(self: BackgroundSaves, request: SaveRequest, pieces: list[Piece]) -> None:
    """Write in this process."""
    self._step = request.step
    buffer = torch.empty(request.size, dtype=torch.uint8)
    stage(pieces, buffer)
    try:
        draft = self.store.draft(request.step, request.attempt)
        writer.write(draft, request, buffer.numpy().data)
    except (OSError, writer.Gone) as error:
        self._error = f"{type(error).__name__}: {error}"


def _save_and_wait(self: Checkpoints, *given: Any, **options: Any) -> str | None:
    problem = _save(self, *given, **options)
    return self.finish() or problem


class SyncCheckpoints(Checkpoints):
    """Checkpoints without a writing process: a save returns when they are written."""

    begin = _begin
    save = _save_and_wait


def write_in_the_trainer() -> None:
    """Let this process write its checkpoints, and wait for them."""
    Checkpoints.begin = _begin  # type: ignore[method-assign]
    Checkpoints.save = _save_and_wait  # type: ignore[method-assign, assignment]
