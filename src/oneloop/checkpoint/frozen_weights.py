"""Frozen parameters as one safetensors file, in an order that depends only on names and dtypes.

The file's bytes do not depend on the sharding. Parameters of a base model are not written. Instead,
a file records the base model's name and revision or checksums.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128

from oneloop.basics.base_models import BaseModel
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.untrusted import delete
from oneloop.checkpoint.named_checkpoint import (
    FILE,
    NAMED,
    base_model_of,
    base_of,
    base_problems,
    file_of,
    fresh,
    names_in,
)
from oneloop.checkpoint.pieces import Piece, header_of
from oneloop.checkpoint.save_request import padded
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.checkpoint.store import Store, flush, vouch, write_file
from oneloop.checkpoint.writer import append


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by their names in a checkpoint."""
    return model_tensors(model, frozen=True)


def write_base(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    agree: Callable[[Any], list[Any]],
) -> tuple[dict[str, Any], str | None]:
    """Write frozen parameters to a new folder, one after another. Collective; rank 0 writes.

    Args:
        folder: which is replaced.
        tensors: by their names in a checkpoint.
        rank: of this process.
        agree: returns a value of all ranks, as a list.

    Returns:
        The size and checksum of the file (on rank 0), and the error if any.
    """
    # Sort them: the order must not depend on the layout, and keeps every tensor aligned.
    ordered = sorted(tensors.items())
    whole = [Piece(name, tensor, (0,) * tensor.ndim) for name, tensor in ordered]
    whole.sort(key=lambda piece: -piece.tensor.element_size())
    text, size = header_of(whole)
    head = padded(text)
    draft = folder.with_name(f".{folder.name}.draft")
    state = xxh3_128()
    stream = None
    problem = None

    # Create the file, on rank 0.
    try:
        if rank == 0:
            delete(draft, inside=folder.parent)
            draft.mkdir(parents=True)
            stream = (draft / FILE).open("wb", buffering=0)
            append(stream, state, memoryview(head), BEATS.beat)
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"

    # Gather one tensor after another, also after an error: every rank takes part.
    for piece in whole:
        tensor = piece.tensor
        if isinstance(tensor, DTensor):
            agree(None)  # wait for rank 0 here: other collectives may have a short time-out
            tensor = tensor.full_tensor()
        if stream is None or problem is not None:
            continue
        try:
            # keeps only one copy on the host
            append(stream, state, _bytes_of(tensor), BEATS.beat)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"

    # Complete the folder.
    entry = {"size": len(head) + size, "xxh3": state.hexdigest()}
    if stream is not None:
        if problem is None:
            problem = _commit(draft, folder, entry, FILE, stream)
        with suppress(OSError):
            stream.close()
    return entry, problem


def write_origin(folder: Path, origin: BaseModel) -> tuple[dict[str, Any], str | None]:
    """Write the base model of frozen parameters; call it on one process.

    Returns its manifest entry, and the error if any, like :func:`write_base`.
    """
    text = json.dumps({**origin.description, "names": sorted(origin.names)}, indent=1).encode()
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        delete(draft, inside=folder.parent)
        draft.mkdir(parents=True)
        entry = write_file(draft / NAMED, text)
    except OSError as error:
        return {}, f"{type(error).__name__}: {error}"
    return {"file": NAMED, **entry}, _commit(draft, folder, entry, NAMED)


def _bytes_of(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _commit(
    draft: Path, folder: Path, entry: dict[str, Any], file: str, stream: Any = None
) -> str | None:
    """Flush the draft and rename it to the folder; return the error if any."""
    try:
        if stream is not None:
            os.fsync(stream.fileno())
        vouch(draft, {}, {file: entry})
        flush(draft)
        delete(folder, inside=folder.parent)
        draft.rename(folder)
        flush(folder.parent)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Written(NamedTuple):
    """Frozen parameters that this process has written, or verified."""

    folder: Path
    entry: dict[str, Any]  # of the manifest
    names: set[str]


class Base:
    """The frozen parameters of a run's checkpoints, stored or only named.

    Args:
        store: the checkpoints folder; the parameters are stored next to it.
        origin: the base model that has them; None: store them.
        once: whether they are stored once; False: in each checkpoint, like other parameters.
        rank: of this process.
        agree: returns a value of all ranks, as a list.
    """

    def __init__(
        self,
        store: Store,
        *,
        origin: BaseModel | None = None,
        once: bool = True,
        rank: int,
        agree: Callable[[Any], list[Any]],
    ) -> None:
        self._store = store
        self._origin = origin
        self._once = once
        self._rank = rank
        self._agree = agree
        self._known: _Written | None = None

    def others(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors that each checkpoint stores, by their names there."""
        if self._origin is None:
            return model_tensors(model, frozen=False if self._once else None)
        elsewhere = self._names(model)
        tensors = model_tensors(model)
        return {name: tensor for name, tensor in tensors.items() if name not in elsewhere}

    def _names(self, model: nn.Module) -> set[str]:
        if self._origin is not None:
            return {f"model.{name}" for name in self._origin.names}
        return set(frozen_tensors(model)) if self._once else set()

    def kept(self, model: nn.Module) -> dict[str, Any]:
        """Return the manifest's entry of the frozen parameters. Collective.

        Write them if they are missing. Raises OSError on all ranks if they cannot be written.
        """
        names = self._names(model)
        if not names:
            return {}
        self._check_base_model()
        if self._known is None or self._known.names != names:
            # Choose a folder that no checkpoint uses: the trained parameters have changed.
            folder = None
            if self._rank == 0:
                folder = fresh(self._store.root.parent, self._store.sealed())
            folder = self._agree(folder)[0]
            self._known = _Written(folder, self._written(folder, model), names)
        return {"base": {"folder": self._known.folder.name, **self._known.entry}}

    def _check_base_model(self) -> None:
        """Raise ValueError on all ranks if the base model has changed since the start."""
        changed = None
        if self._origin is not None and self._rank == 0:
            try:
                self._origin.unchanged()
            except ValueError as error:
                changed = str(error)
        changed = self._agree(changed)[0]
        if changed:
            raise ValueError(changed)

    def check(self, checkpoint: Path, model: nn.Module) -> None:
        """Verify a checkpoint's frozen parameters. Collective.

        Raises ValueError if they are damaged, or the model has another base model.
        """
        # The checkpoint and the model must both store them, or both name a base model.
        recorded = base_of(checkpoint)
        named = recorded is not None and file_of(recorded[1]) == NAMED
        if named == (self._origin is None):
            kinds = ["stored", "only referenced"]
            raise ValueError(
                f"{checkpoint}: its frozen parameters are {kinds[named]}, but those of this model "
                f"are {kinds[not named]}"
            )

        # Verify the files.
        wrong = self._agree(base_problems(checkpoint) if self._rank == 0 else [])[0]
        if recorded is not None and wrong:
            raise ValueError(
                f"{recorded[0]}, with the frozen parameters of {checkpoint.name}, is damaged "
                f"({'; '.join(wrong)}); restore the folder from a copy, or choose another run.dir"
            )

        # Compare the base model.
        if self._origin is not None:
            other = ""
            if self._rank == 0:
                other = self._origin.difference(base_model_of(checkpoint) or {})
            other = self._agree(other)[0]
            if other:
                raise ValueError(
                    f"{checkpoint} needs the base model {other}; set task.model to the model "
                    "that it was trained with"
                )

        # Later checkpoints of this run refer to the same files.
        own = checkpoint.resolve().parent == self._store.root.resolve()
        known = None
        if own and recorded is not None:
            known = _Written(*recorded, names_in(recorded[0]))
        self._known = known

    def _written(self, folder: Path, model: nn.Module) -> dict[str, Any]:
        """Write the frozen parameters; return the manifest entry. Collective."""
        made: Any = None
        if self._origin is None:
            made = write_base(folder, frozen_tensors(model), rank=self._rank, agree=self._agree)
        elif self._rank == 0:
            made = write_origin(folder, self._origin)
        entry, problem = self._agree(made)[0]
        if problem is not None:
            raise OSError(f"{folder} with the frozen parameters cannot be written: {problem}")
        return dict(entry)
