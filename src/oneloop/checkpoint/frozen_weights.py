"""Frozen parameters as one safetensors file, in an order that depends only on names and dtypes.

The file's bytes do not depend on the sharding. A damaged file can thus be rewritten from the newly
built model, and is accepted only if it has the old checksum. Parameters of a base model are not
written. Instead, a file records the base model's name and revision or checksums.
"""

import json
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

from oneloop.basics.base_models import BaseModel
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
from oneloop.checkpoint.state_dict import Piece, header_of, model_tensors
from oneloop.checkpoint.store import Store, flush, vouch, write_file


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by their names in a checkpoint."""
    return model_tensors(model, frozen=True)


def write_base(
    folder: Path, tensors: Mapping[str, Tensor], *, rank: int
) -> tuple[dict[str, Any], str | None]:
    """Write frozen parameters to a new folder, one after another. Collective; rank 0 writes. Return
    the size and checksum of the file (on rank 0), and the error if any."""
    whole = [Piece(name, tensor, (0,) * tensor.ndim) for name, tensor in sorted(tensors.items())]
    whole.sort(key=lambda piece: -piece.tensor.element_size())
    text, size = header_of(whole)
    padded = text.encode() + b" " * (-len(text.encode()) % 8)
    draft, state, problem, stream = (
        folder.with_name(f".{folder.name}.draft"),
        xxh3_128(),
        None,
        None,
    )
    try:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            stream = (draft / FILE).open("wb")
            _append(stream, state, len(padded).to_bytes(8, "little") + padded)
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    for piece in whole:
        tensor = piece.tensor.full_tensor() if isinstance(piece.tensor, DTensor) else piece.tensor
        if stream is None or problem is not None:
            continue
        try:
            _append(
                stream,
                state,
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data,
            )
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    entry = {"size": 8 + len(padded) + size, "xxh3": state.hexdigest()}
    if stream is not None:
        problem = _commit(draft, folder, entry, FILE, stream) if problem is None else problem
        with suppress(OSError):
            stream.close()
    return entry, problem


def write_origin(folder: Path, origin: BaseModel) -> tuple[dict[str, Any], str | None]:
    """Write the base model of frozen parameters; call it on one process. Returns like
    :func:`write_base`."""
    text = json.dumps({**origin.description, "names": sorted(origin.names)}, indent=1).encode()
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        entry = write_file(draft / NAMED, text)
    except OSError as error:
        return {}, f"{type(error).__name__}: {error}"
    return {"file": NAMED, **entry}, _commit(draft, folder, entry, NAMED)


def _append(stream: Any, state: Any, data: Any) -> None:
    stream.write(data)
    state.update(data)


def _commit(
    draft: Path, folder: Path, entry: dict[str, Any], file: str, stream: Any = None
) -> str | None:
    try:
        if stream is not None:
            stream.flush()
            os.fsync(stream.fileno())
        vouch(draft, {}, {file: entry})
        flush(draft)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        flush(folder.parent)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Base:
    """The frozen parameters of a run's checkpoints, stored or (``origin``) only named. ``agree``
    gathers a value of all ranks, and ``say`` reports repairs on rank 0."""

    def __init__(
        self,
        store: Store,
        *,
        origin: BaseModel | None = None,
        rank: int,
        agree: Callable[[Any], list[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._store, self._origin, self._rank, self._agree, self._say = (
            store,
            origin,
            rank,
            agree,
            say,
        )
        self._known: tuple[Path, dict[str, Any], set[str]] | None = None  # folder, entry and names

    def others(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors that each checkpoint stores, by their names there."""
        if self._origin is None:
            return model_tensors(model, frozen=False)
        names = self._origin.names
        return {
            name: held
            for name, held in model_tensors(model).items()
            if name.removeprefix("model.") not in names
        }

    def _names(self, model: nn.Module) -> set[str]:
        if self._origin is not None:
            return {f"model.{name}" for name in self._origin.names}
        return set(frozen_tensors(model))

    def kept(self, model: nn.Module) -> dict[str, Any]:
        """Return the manifest's entry of the frozen parameters, after writing them if they are
        missing. Collective. Raises OSError on all ranks if they cannot be written."""
        names = self._names(model)
        if not names:
            return {}
        self._check_base_model()
        if self._known is None or self._known[2] != names:
            store = self._store
            folder = self._agree(
                fresh(store.root.parent, store.sealed()) if self._rank == 0 else None
            )[0]
            self._known = folder, self._written(folder, model), names
        folder, entry, _ = self._known
        return {"base": {"folder": folder.name, **entry}}

    def _check_base_model(self) -> None:
        """Raise ValueError on all ranks if the base model has changed since the start."""
        changed = None
        if self._origin is not None and self._rank == 0:
            try:
                self._origin.unchanged()
            except ValueError as error:
                changed = str(error)
        if changed := self._agree(changed)[0]:
            raise ValueError(changed)

    def check(self, checkpoint: Path, model: nn.Module) -> None:
        """Verify a checkpoint's frozen parameters. If they are damaged, write them again from the
        newly built model, provided that it is bit-identical. Collective. Raises ValueError if it is
        not, or has another base model."""
        recorded = base_of(checkpoint)
        named = recorded is not None and file_of(recorded[1]) == NAMED
        if named != (self._origin is not None):
            one, other = ("only referenced", "stored") if named else ("stored", "only referenced")
            raise ValueError(
                f"{checkpoint}: its frozen parameters are {one}, but those of this model are "
                f"{other}"
            )
        own = checkpoint.resolve().parent == self._store.root.resolve()
        wrong = "; ".join(self._agree(base_problems(checkpoint) if self._rank == 0 else [])[0])
        if recorded is not None and wrong:
            self._repair(checkpoint, *recorded, model, own=own, wrong=wrong)
        if self._origin is not None:
            other = (
                self._origin.difference(base_model_of(checkpoint) or {}) if self._rank == 0 else ""
            )
            if other := self._agree(other)[0]:
                raise ValueError(
                    f"{checkpoint} needs the base model {other}; set task.model to the model "
                    "that it was trained with"
                )
        self._known = (*recorded, names_in(recorded[0])) if own and recorded is not None else None

    def _repair(
        self, checkpoint: Path, folder: Path, entry: Any, model: nn.Module, *, own: bool, wrong: str
    ) -> None:
        if not own:
            raise ValueError(
                f"{folder}, with the frozen parameters of {checkpoint}, is damaged ({wrong}); "
                "restore it"
            )
        again = folder.with_name(f".{folder.name}.again")
        made = self._written(again, model)
        same = all(entry[key] == made[key] for key in made)
        if self._rank == 0:
            shutil.rmtree(folder if same else again, ignore_errors=True)
            if same:
                again.rename(folder)
                self._say(f"{folder} was damaged ({wrong}); rewriting it from the initial model")
        self._agree(None)  # no rank reads the file before
        if not same:
            why = (
                f"the frozen parameters of {checkpoint.name} are damaged ({wrong}), and the new "
                "model has others"
            )
            raise ValueError(
                f"{folder}: {why}; restore the folder from a copy, or the files of the base model"
            )

    def _written(self, folder: Path, model: nn.Module) -> dict[str, Any]:
        made: Any = None
        if self._origin is None:
            made = write_base(folder, frozen_tensors(model), rank=self._rank)
        elif self._rank == 0:
            made = write_origin(folder, self._origin)
        entry, problem = self._agree(made)[0]
        if problem is not None:
            raise OSError(f"{folder} with the frozen parameters cannot be written: {problem}")
        return dict(entry)
