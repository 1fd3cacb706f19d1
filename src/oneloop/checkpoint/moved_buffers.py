"""Buffers that training changes on each rank: the carried state of an LSTM, a queue of keys.

A checkpoint has them for each rank, also non-persistent ones, as ``rank.<number>.<buffer>``. (As
``model.<buffer>`` it has persistent ones of rank 0.) A buffer has moved if its content differs from
that at the start of the run.

>>> moved = MovedBuffers(model)                   # at the start of the run
>>> own = moved.tensors(gather, say)              # at a save, on every rank
>>> moved.go_back(folder)                         # before a load
>>> targets = moved.targets(folder, say)
>>> moved.install(folder, targets)                # after it
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hashes
from oneloop.basics.tensors import Models, as_real, together
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.pieces import NAMES

PREFIX = "rank."  # of the names in a checkpoint; no parameter's name there begins with it
_COPIED = 1 << 26  # bytes of buffers that are copied at the start
_DTYPES = {text: dtype for dtype, text in NAMES.items()}


class _Content(NamedTuple):
    """What identifies the content of a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int


class MovedBuffers:
    """The buffers of a model that have moved since the start of the run, on any rank.

    Statistics of torch's own BatchNorm and InstanceNorm are left out: their forward in training
    does not read them, so those of rank 0 suffice.

    Args:
        model: as prepared, or several by name.
    """

    def __init__(self, model: Models) -> None:
        self._model = together(model)
        several = dist.is_initialized()
        self._rank = dist.get_rank() if several else 0
        self._ranks = dist.get_world_size() if several else 1
        self._moved: set[str] = set()  # on any rank; a buffer that has moved stays here
        self._reported = False
        self._begin()

    def _begin(self) -> None:
        """Record the contents of all buffers, and copy small ones: a rewind may restore them."""
        buffers = _buffers(self._model)
        self._start = _contents(buffers)
        self._without_tensor = _registered(self._model) - buffers.keys()
        self._copies: dict[str, Tensor] = {}
        left = _COPIED
        for name, buffer in sorted(buffers.items(), key=lambda pair: pair[1].nbytes):
            left -= buffer.nbytes
            if left >= 0:
                self._copies[name] = buffer.detach().to("cpu", copy=True)

    def tensors(
        self, gather: Callable[[Any], list[Any]], say: Callable[[str], None]
    ) -> dict[str, Tensor]:
        """Return this rank's moved buffers by their names in a checkpoint, not copied. Collective.

        Args:
            gather: returns a value of all ranks, as a list.
            say: reports, once, buffers that cannot be saved.
        """
        # Find what has moved here, and which of it cannot be saved.
        buffers = _buffers(self._model)
        now = _contents(buffers)
        moved = {name for name, content in now.items() if self._start.get(name) != content}
        lost = {f"{name} (it was removed)" for name in self._start.keys() - now.keys()}
        for name in [*moved]:
            dtype = buffers[name].dtype
            began = self._start.get(name)
            complex_before = began is not None and began.dtype == dtype
            if as_real(buffers[name]).dtype not in NAMES or (
                dtype.is_complex and not complex_before
            ):
                lost.add(f"{name} ({dtype})")
                moved.discard(name)

        # All ranks save the same buffers.
        for others, lost_there in gather((moved, lost)):
            self._moved |= others
            lost |= lost_there
        if lost and not self._reported and self._rank == 0:
            say(
                "training changes buffers that a checkpoint cannot hold, so a resume is not "
                f"bit-identical: {', '.join(sorted(lost))}"
            )
        self._reported |= bool(lost)

        own = {}
        for name in sorted(self._moved & buffers.keys()):
            own[f"{PREFIX}{self._rank}.{name}"] = as_real(buffers[name].detach())
        return own

    def targets(self, folder: Path, say: Callable[[str], None]) -> dict[str, Tensor]:
        """Return new tensors for this rank's buffers in a checkpoint, by their names there.

        Buffers of the model that have another shape than in the checkpoint, or do not exist yet,
        are replaced by empty ones, so that it can be loaded.

        Args:
            folder: the checkpoint.
            say: reports that it is of another number of ranks: then all get those of rank 0.
        """
        manifest = read_manifest(folder)
        listed = manifest.get("tensors", {})  # only a checkpoint has them
        names = _moved_in(listed)
        rank = self._rank
        saved = manifest["about"].get("ranks")
        if saved != self._ranks:
            rank = 0
            if names and self._rank == 0:
                say(
                    f"the run had {saved} processes and continues on {self._ranks}, so buffers "
                    f"that training changes are those of rank 0: {', '.join(sorted(names))}; the "
                    "training differs from that of an uninterrupted run"
                )

        targets = {}
        buffers = _buffers(self._model)
        for name in sorted(names):
            entry = f"{PREFIX}{rank}.{name}"
            if entry not in listed:
                continue  # another rank has it
            held = buffers.get(name)
            fresh = _empty(listed[entry], held, self._device())
            persistent = f"model.{name}" in listed
            whole = listed[f"model.{name}"] if persistent else listed[entry]
            like = _empty(whole, held, fresh.device)
            if held is None or (held.shape, held.dtype) != (like.shape, like.dtype):
                self._replace(name, like, persistent=persistent)
            targets[entry] = as_real(fresh)
        return targets

    @torch.no_grad()
    def go_back(self, folder: Path) -> None:
        """Give buffers that a checkpoint does not list the contents of the start, for a rewind.

        Call it before :meth:`targets`. Large ones stay; persistent ones are loaded.
        """
        listed = _moved_in(read_manifest(folder).get("tensors", {}))
        now = _contents(_buffers(self._model))
        for name in (now.keys() | self._start.keys()) - listed:
            if now.get(name) == self._start.get(name):
                continue
            if name in self._copies:
                self._set(name, self._copies[name])
            elif name not in self._start:
                self._remove(name)

    @torch.no_grad()
    def install(self, folder: Path, targets: dict[str, Tensor]) -> None:
        """Set the buffers to the loaded targets of :meth:`targets`.

        Args:
            folder: the checkpoint.
            targets: the result of :meth:`targets`.
        """
        buffers = _buffers(self._model)
        for entry, loaded in targets.items():
            name = _buffer_in(entry)
            if buffers[name].is_complex():
                loaded = torch.view_as_complex(loaded)
            self._set(name, loaded)
        self._moved = _moved_in(read_manifest(folder)["tensors"])
        self._begin()

    def _set(self, name: str, content: Tensor) -> None:
        """Set the content of a buffer, in place if its shape and dtype stay."""
        held = _buffers(self._model).get(name)
        if held is not None and (held.shape, held.dtype) == (content.shape, content.dtype):
            held.copy_(content)
        else:
            self._replace(name, content.to(self._device(), copy=True), persistent=False)

    def _remove(self, name: str) -> None:
        """Remove a buffer that did not exist at the start."""
        held = _buffers(self._model)[name]
        for module in self._model.modules():
            for key, buffer in [*module._buffers.items()]:
                if buffer is held and name in self._without_tensor:
                    module._buffers[key] = None
                elif buffer is held:
                    delattr(module, key)

    def _device(self) -> torch.device:
        """Return the device of the model."""
        for tensor in self._model.parameters():
            return tensor.device
        return torch.device("cpu")

    def _replace(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Set the buffer of this name to another tensor, or register it."""
        held = _buffers(self._model).get(name)
        path, _, key = name.rpartition(".")
        owner: nn.Module | None = None
        for prefix, module in self._model.named_modules():
            # A tied buffer has several names.
            for other, buffer in module._buffers.items():
                if buffer is held and held is not None:
                    module._buffers[other] = tensor
            # A wrapper has the same name as the module inside, which comes later.
            if bare_name(f"{prefix}.").rstrip(".") == path:
                owner = module
        if held is not None or owner is None:
            return
        if key in owner._buffers:
            owner._buffers[key] = tensor
        else:
            owner.register_buffer(key, tensor, persistent=persistent)


def _moved_in(listed: Collection[str]) -> set[str]:
    """Return the names of the moved buffers among the names of a checkpoint's tensors."""
    return {_buffer_in(entry) for entry in listed if entry.startswith(PREFIX)}


def _buffer_in(entry: str) -> str:
    """Return the name of the buffer in ``rank.<number>.<buffer>``."""
    return entry.split(".", 2)[2]


def _empty(listed: Any, held: Tensor | None, device: torch.device) -> Tensor:
    """Return a tensor for an entry of a manifest, on the device of the buffer.

    Args:
        listed: dtype and shape.
        held: the buffer; None: it does not exist yet.
        device: if it does not exist.
    """
    dtype = _DTYPES[listed[0]]
    tensor = torch.zeros(listed[1], dtype=dtype, device=device if held is None else held.device)
    if held is not None and held.is_complex():
        return torch.view_as_complex(tensor)
    return tensor


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers by name that exist now, without statistics of torch's norms."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and _has_torchs_forward(module):
            continue
        for key, buffer in module._buffers.items():
            if type(buffer) is not Tensor or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[bare_name(f"{prefix}.{key}".lstrip("."))] = buffer
    return found


def _registered(model: nn.Module) -> set[str]:
    """Return the names of all buffers, also of those that have no tensor yet."""
    names = set()
    for prefix, module in model.named_modules():
        for key in module._buffers:
            names.add(bare_name(f"{prefix}.{key}".lstrip(".")))
    return names


def _has_torchs_forward(module: nn.Module) -> bool:
    """Whether the forward is torch's, and not that of a subclass or of the user."""
    is_torch = type(module).forward.__module__.startswith("torch.nn.modules.")
    return is_torch and "forward" not in vars(module)


def _contents(buffers: dict[str, Tensor]) -> dict[str, _Content]:
    """Return the contents of buffers by name. Host sync."""
    hashes = tensor_hashes(buffers.values())
    found = {}
    for (name, buffer), number in zip(buffers.items(), hashes, strict=True):
        found[name] = _Content(buffer.dtype, tuple(buffer.shape), number)
    return found
