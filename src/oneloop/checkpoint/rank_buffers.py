"""The small buffers of each rank, such as the carried state of an LSTM or a queue of keys.

A checkpoint has them for each rank, also non-persistent ones, as ``rank.<number>.<buffer>``. (As
``model.<buffer>`` it has persistent ones of rank 0.)

>>> buffers = RankBuffers(model)                  # at the start of the run
>>> own = buffers.tensors(say)                    # at a save, on every rank
>>> targets = buffers.targets(folder)             # before a load
>>> buffers.install(folder, targets, say)         # after it
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import Models, as_real, together
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.pieces import NAMES

PREFIX = "rank."  # of the names in a checkpoint; no parameter's name there begins with it
_MOST = 1 << 26  # bytes of the buffers that a checkpoint has for each rank
_COMPLEX = " (complex)"  # end of a name in a checkpoint: stored as real numbers
_NONE = " (None)"  # end of a name in a checkpoint: registered without a tensor
_DTYPES = {text: dtype for dtype, text in NAMES.items()}


class RankBuffers:
    """The small buffers of a model on this rank, which a resume restores.

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
        self._at_start = _buffers(self._model).keys()
        self._reported = False

    def tensors(self, say: Callable[[str], None]) -> dict[str, Tensor]:
        """Return this rank's small buffers by their names in a checkpoint, not copied.

        Args:
            say: reports, once, buffers that a checkpoint does not hold for each rank.
        """
        # Take small ones first, until the limit is reached.
        buffers = _buffers(self._model)
        lost = [f"{name} (removed)" for name in self._at_start - buffers.keys()]
        own = {}
        left = _MOST
        for name, buffer in sorted(buffers.items(), key=_size):
            left -= _size((name, buffer))
            entry = f"{PREFIX}{self._rank}.{name}"
            if buffer is None:
                own[entry + _NONE] = torch.empty(0)
            elif left < 0 or as_real(buffer).dtype not in NAMES:
                lost.append(f"{name} ({buffer.dtype}, {buffer.nbytes:,} bytes)")
            else:
                own[entry + _COMPLEX * buffer.is_complex()] = as_real(buffer.detach())

        if lost and not self._reported and self._rank == 0:
            self._reported = True
            say(
                "of some buffers, a checkpoint has only those of rank 0, if they are persistent "
                f"(for each process, it holds {_MOST >> 20} MiB, in dtypes of safetensors); if "
                f"training changes them, a resume is not bit-identical: {', '.join(sorted(lost))}"
            )
        return own

    def targets(self, folder: Path) -> dict[str, Tensor]:
        """Return new tensors on the host for this rank's buffers, by their names in a checkpoint.

        Remove buffers that were registered after the start of the run, unless the checkpoint has
        them: its tensors must be those of the model.

        Args:
            folder: the checkpoint; if it is of another number of ranks, its rank 0 is used.
        """
        manifest = read_manifest(folder)
        rank = self._rank if manifest["about"].get("ranks") == self._ranks else 0
        targets = {}
        for entry, (kind, shape) in manifest.get("tensors", {}).items():
            if entry.startswith(f"{PREFIX}{rank}."):
                targets[entry] = torch.empty(shape, dtype=_DTYPES[kind])

        late = _buffers(self._model).keys() - self._at_start
        for name in late - {buffer_in(entry) for entry in targets}:
            path, _, key = name.rpartition(".")
            delattr(_modules(self._model)[path], key)
        return targets

    @torch.no_grad()
    def install(self, folder: Path, targets: dict[str, Tensor], say: Callable[[str], None]) -> None:
        """Set the buffers to the loaded targets of :meth:`targets`, in place if their shape stays.

        Args:
            folder: the checkpoint.
            targets: the result of :meth:`targets`.
            say: reports that the checkpoint is of another number of ranks.
        """
        manifest = read_manifest(folder)
        modules = _modules(self._model)
        buffers = _buffers(self._model)
        device = next((parameter.device for parameter in self._model.parameters()), None)
        changed = []
        for entry, loaded in targets.items():
            name = buffer_in(entry)
            held = buffers.get(name)
            new = torch.view_as_complex(loaded) if entry.endswith(_COMPLEX) else loaded
            if held is not None and (held.shape, held.dtype) == (new.shape, new.dtype):
                if not torch.equal(held.cpu(), new):
                    changed.append(name)
                held.copy_(new)
                continue

            # Register it, or replace it, also where it is tied.
            path, _, key = name.rpartition(".")
            if path not in modules:
                raise ValueError(
                    f"the checkpoint has the buffer {name}, but the model has no such module; "
                    "use the same model, or another run.dir"
                )
            if key not in modules[path]._buffers:
                persistent = f"model.{name}" in manifest["tensors"]
                modules[path].register_buffer(key, None, persistent=persistent)
            placed = None if entry.endswith(_NONE) else new.to(device)
            if held is not placed:
                changed.append(name)
            modules[path]._buffers[key] = placed
            for module in modules.values():
                for other, buffer in module._buffers.items():
                    if buffer is held is not None:
                        module._buffers[other] = placed

        saved = manifest["about"].get("ranks")
        if changed and saved != self._ranks and self._rank == 0:
            say(
                f"the run had {saved} processes and continues on {self._ranks}, so buffers "
                f"that training changes are those of rank 0: {', '.join(sorted(changed))}; the "
                "training differs from that of an uninterrupted run"
            )


def buffer_in(entry: str) -> str:
    """Return the name of the buffer in ``rank.<number>.<buffer>``."""
    return entry.split(".", 2)[2].removesuffix(_COMPLEX).removesuffix(_NONE)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by their names without wrappers, whose names are those of the insides."""
    named = model.named_modules()  # a wrapper comes first
    return {bare_name(f"{path}.").rstrip("."): module for path, module in named}


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Return all registered buffers by name, without statistics of torch's norms."""
    found: dict[str, Tensor | None] = {}
    seen: set[int] = set()
    for path, module in _modules(model).items():
        is_torchs = type(module).forward.__module__.startswith("torch.nn.modules.")
        if isinstance(module, _NormBase) and is_torchs and "forward" not in vars(module):
            continue
        for key, buffer in module._buffers.items():
            if buffer is None or (type(buffer) is Tensor and id(buffer) not in seen):
                seen.add(id(buffer))
                found[f"{path}.{key}".lstrip(".")] = buffer
    return found


def _size(named: tuple[str, Tensor | None]) -> int:
    buffer = named[1]
    return 0 if buffer is None else buffer.nbytes
