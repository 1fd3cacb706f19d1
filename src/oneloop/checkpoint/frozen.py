"""Frozen parameters as one safetensors file, in an order that only names and types decide.

The same parameters make the same bytes however they are sharded: so a damaged file can be made anew from the model as
built, and is taken only where its checksum is the old one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128

from oneloop.checkpoint.base import FILE, base_of, base_problems, fresh, names_in
from oneloop.checkpoint.state import Piece, header_of, model_tensors
from oneloop.checkpoint.store import Store, flush, vouch


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, as a checkpoint names them."""
    return model_tensors(model, frozen=True)


def write_base(folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> tuple[dict[str, Any], str | None]:
    """Writes frozen parameters to a folder, one after another. Every rank must get here; rank 0 writes.

    Args:
        folder: to write to; what was there is replaced.
        tensors: by name, whole or sharded.
        rank: this one.

    Returns:
        The file's size and checksum (on rank 0), and what went wrong.
    """
    whole = [Piece(name, tensor, (0,) * tensor.ndim) for name, tensor in sorted(tensors.items())]
    whole.sort(key=lambda piece: -piece.tensor.element_size())
    text, size = header_of(whole)
    head = text.encode() + b" " * (-len(text.encode()) % 8)
    draft, state, trouble, stream = folder.with_name(f".{folder.name}.draft"), xxh3_128(), None, None
    try:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            stream = (draft / FILE).open("wb")
            _put(stream, state, len(head).to_bytes(8, "little") + head)
    except OSError as error:
        trouble = f"{type(error).__name__}: {error}"
    for piece in whole:
        tensor = piece.tensor.full_tensor() if isinstance(piece.tensor, DTensor) else piece.tensor
        if stream is None or trouble is not None:
            continue
        try:
            _put(stream, state, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            trouble = f"{type(error).__name__}: {error}"
    entry = {"size": 8 + len(head) + size, "xxh3": state.hexdigest()}
    if stream is not None:
        trouble = _sealed(stream, draft, folder, entry) if trouble is None else trouble
        with suppress(OSError):
            stream.close()
    return entry, trouble


def _put(stream: Any, state: Any, data: Any) -> None:
    stream.write(data)
    state.update(data)


def _sealed(stream: Any, draft: Path, folder: Path, entry: dict[str, Any]) -> str | None:
    """Puts the draft in place, flushed; what went wrong."""
    try:
        stream.flush()
        os.fsync(stream.fileno())
        vouch(draft, {}, {FILE: entry})
        flush(draft)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        flush(folder.parent)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Base:
    """The frozen parameters of one run's checkpoints.

    Args:
        store: of the checkpoints.
        rank: this one; rank 0 writes.
        agree: gives every rank what all ranks have.
        say: how a person is told of what is mended, on rank 0.
    """

    def __init__(
        self, store: Store, *, rank: int, agree: Callable[[Any], list[Any]], say: Callable[[str], None]
    ) -> None:
        self._store, self._rank, self._agree, self._say = store, rank, agree, say
        self._known: tuple[Path, dict[str, Any]] | None = None

    def kept(self, model: nn.Module) -> dict[str, Any]:
        """What a manifest says of the frozen parameters, which are written now if they are not yet. Every rank must
        get here.

        Raises:
            OSError: on all ranks: they could not be written.
        """
        frozen = frozen_tensors(model)
        if not frozen:
            return {}
        if self._known is None or names_in(self._known[0]) != set(frozen):
            store = self._store
            folder = self._agree(fresh(store.root.parent, store.sealed()) if self._rank == 0 else None)[0]
            self._known = folder, self._written(folder, frozen)
        folder, entry = self._known
        return {"base": {"folder": folder.name, **entry}}

    def check(self, checkpoint: Path, model: nn.Module) -> None:
        """Looks whether a checkpoint's frozen parameters are whole; else writes them again from the model as built,
        where they come out the same to the bit. Every rank must get here.

        Raises:
            ValueError: they do not.
        """
        told = base_of(checkpoint)
        own = checkpoint.resolve().parent == self._store.root.resolve()
        self._known = told if own else None
        wrong = "; ".join(self._agree(base_problems(checkpoint) if self._rank == 0 else [])[0])
        if told is None or not wrong:
            return
        folder, entry = told
        if not own:
            raise ValueError(f"{folder}, with the frozen parameters of {checkpoint}, is damaged ({wrong}); restore it")
        again = folder.with_name(f".{folder.name}.again")
        made = self._written(again, frozen_tensors(model))
        same = all(entry[key] == made[key] for key in made)
        if self._rank == 0:
            shutil.rmtree(folder if same else again, ignore_errors=True)
            if same:
                again.rename(folder)
                self._say(f"{folder} was damaged ({wrong}), and is written again from the model as built")
        self._agree(None)  # no rank reads it before
        if not same:
            raise ValueError(
                f"{folder}, with the frozen parameters of {checkpoint.name}, is damaged ({wrong}), and those of the"
                " model as it is built now are others; restore the folder from a copy, or what the model was made from"
            )

    def _written(self, folder: Path, frozen: Mapping[str, Tensor]) -> dict[str, Any]:
        entry, trouble = self._agree(write_base(folder, frozen, rank=self._rank))[0]
        if trouble is not None:
            raise OSError(f"{folder} with the frozen parameters cannot be written: {trouble}")
        return dict(entry)
