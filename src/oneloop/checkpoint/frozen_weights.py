"""Frozen parameters as one safetensors file, in an order that depends only on names and dtypes.

The file's bytes do not depend on the sharding. Parameters of a base model are not written. Instead,
a file records the base model's name and revision or checksums. Its folder is ``base/CHECKSUM``.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_hexdigest

from oneloop.basics.base_models import BaseModel
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.untrusted import delete
from oneloop.checkpoint.manifest import BASE, base_folder
from oneloop.checkpoint.named_checkpoint import (
    FILE,
    NAMED,
    base_model_of,
    base_of,
    base_problems,
)
from oneloop.checkpoint.pieces import Piece, header_of
from oneloop.checkpoint.ranks import Ranks
from oneloop.checkpoint.save_request import padded
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.checkpoint.store import (
    Store,
    flush,
    problems,
    vouch,
    write_file,
    write_pieces,
)

_CHUNK = 1 << 22  # bytes


def write_base(
    run: Path, tensors: Mapping[str, Tensor], origin: BaseModel | None, ranks: Ranks
) -> dict[str, Any]:
    """Write frozen parameters, or the base model that has them. Collective; rank 0 writes.

    Args:
        run: the run folder.
        tensors: by their names in a checkpoint.
        origin: the base model; None: write the tensors, one after another.
        ranks: of the run.

    Returns:
        The manifest entry.

    Raises:
        OSError: on all ranks, if they cannot be written.
    """
    pieces = _content(tensors, ranks)
    draft = run / f".{BASE}.draft"

    def write() -> dict[str, Any]:
        try:
            if not ranks.is_main:
                return {}
            delete(draft, inside=run)
            draft.mkdir(parents=True)
            if origin is None:
                entry = {"file": FILE, **write_pieces(draft / FILE, pieces)}
            else:
                about = {**origin.description, "names": sorted(origin.names)}
                content = json.dumps(about, indent=1).encode()
                entry = {"file": NAMED, **write_file(draft / NAMED, content)}
            _commit(draft, base_folder(run, entry), entry)
            return entry
        finally:
            # Every rank takes part in gathering, also after an error.
            for _ in pieces if origin is None else ():
                pass

    try:
        entry: dict[str, Any] = ranks.all_of(write)[0]
    except OSError as error:
        raise OSError(
            f"{run / BASE} with the frozen parameters cannot be written: {type(error).__name__}: "
            f"{error}"
        ) from error
    return entry


def _content(tensors: Mapping[str, Tensor], ranks: Ranks) -> Iterator[memoryview]:
    """Yield the content of a file with these tensors, which are gathered one after another."""
    # Sort them: the order must not depend on the layout, and keeps every tensor aligned.
    ordered = sorted(tensors.items())
    pieces = [Piece(name, tensor, (0,) * tensor.ndim) for name, tensor in ordered]
    pieces.sort(key=lambda piece: -piece.tensor.element_size())
    yield memoryview(padded(header_of(pieces)[0]))
    for piece in pieces:
        tensor = piece.tensor.detach()
        if isinstance(tensor, DTensor):
            ranks.gather(None)  # wait for rank 0 here: other collectives may have a short time-out
            tensor = tensor.full_tensor()
        if ranks.is_main:
            data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]
                BEATS.beat()


def _commit(draft: Path, folder: Path, entry: dict[str, Any]) -> None:
    """Flush the draft and rename it to the folder, unless that is intact."""
    if not problems(folder):
        delete(draft, inside=draft.parent)
        return
    vouch(draft, {}, {entry["file"]: {"size": entry["size"], "xxh3": entry["xxh3"]}})
    flush(draft)
    folder.parent.mkdir(exist_ok=True)
    delete(folder, inside=folder.parent)
    draft.rename(folder)
    flush(folder.parent)


class Base:
    """The frozen parameters of a run's checkpoints, stored or only named.

    Args:
        store: the checkpoints folder; the parameters are stored next to it.
        origin: the base model that has them; None: store them.
        once: whether they are stored once; False: in each checkpoint, like other parameters.
        ranks: of the run.
    """

    def __init__(
        self, store: Store, ranks: Ranks, *, origin: BaseModel | None = None, once: bool = True
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._origin = origin
        self._once = once
        # manifest entry of what this process has written, or verified
        self._known: dict[str, Any] = {}

    def others(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors that each checkpoint stores, by their names there."""
        elsewhere = self._names(model)
        tensors = model_tensors(model)
        return {name: tensor for name, tensor in tensors.items() if name not in elsewhere}

    def _names(self, model: nn.Module) -> set[str]:
        if self._origin is not None:
            return {f"model.{name}" for name in self._origin.names}
        return set(model_tensors(model, frozen=True)) if self._once else set()

    def kept(self, model: nn.Module) -> dict[str, Any]:
        """Return the manifest's entry of the frozen parameters. Collective.

        Write them if they are missing. Raises OSError on all ranks if they cannot be written.
        """
        names = self._names(model)
        if not names:
            return {}
        if self._origin is not None:
            self._ranks.from_main(self._origin.unchanged)
        names_hash = xxh3_64_hexdigest("\n".join(sorted(names)).encode())
        if self._known.get("names") != names_hash:
            tensors = model_tensors(model, frozen=True) if self._origin is None else {}
            written = write_base(self._store.root.parent, tensors, self._origin, self._ranks)
            self._known = {**written, "names": names_hash}
        return {"base": self._known}

    def check(self, checkpoint: Path, model: nn.Module) -> None:
        """Verify a checkpoint's frozen parameters. Collective.

        Raises ValueError if they are damaged, or the model has another base model.
        """
        # The checkpoint and the model must both store them, or both name a base model.
        recorded = base_of(checkpoint)
        named = recorded is not None and recorded[1]["file"] == NAMED
        if named == (self._origin is None):
            kinds = ["stored", "only referenced"]
            raise ValueError(
                f"{checkpoint}: its frozen parameters are {kinds[named]}, but those of this model "
                f"are {kinds[not named]}"
            )

        # Verify the files.
        wrong = self._ranks.from_main(lambda: base_problems(checkpoint))
        if recorded is not None and wrong:
            raise ValueError(
                f"{recorded[0]}, with the frozen parameters of {checkpoint.name}, is damaged "
                f"({'; '.join(wrong)}); restore the folder from a copy, or choose another run.dir"
            )

        # Compare the base model.
        origin = self._origin
        if origin is not None:
            other = self._ranks.from_main(
                lambda: origin.difference(base_model_of(checkpoint) or {})
            )
            if other:
                raise ValueError(
                    f"{checkpoint} needs the base model {other}; set task.model to the model "
                    "that it was trained with"
                )

        # Later checkpoints of this run refer to the same files.
        own = checkpoint.resolve().parent == self._store.root.resolve()
        self._known = recorded[1] if own and recorded is not None else {}
