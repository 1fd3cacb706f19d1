"""The small buffers of each rank, such as the carried state of an LSTM or a queue of keys.

A checkpoint has them for each rank, also non-persistent ones, as ``rank.<number>.<buffer>``. (As
``model.<buffer>`` it has persistent ones of rank 0.)

>>> buffers = RankBuffers(model)                  # at the start of the run
>>> own = buffers.tensors(say)                    # at a save, on every rank
>>> targets = buffers.targets(folder)             # before a load
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from oneloop.basics.launcher import rank, ranks
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import as_real, unwrapped
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.pieces import NAMES

PREFIX = "rank."  # of the names in a checkpoint; no parameter's name there begins with it
_MOST = 1 << 26  # bytes of a buffer that a checkpoint has for each rank
_COMPLEX = " (complex)"  # end of a name in a checkpoint: stored as real numbers
_DTYPES = {text: dtype for dtype, text in NAMES.items()}
# Their forward in training does not read their statistics, so those of rank 0 suffice.
_NORMS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


class RankBuffers:
    """The small buffers of a model on this rank, without statistics of torch's own norms.

    Args:
        model: as prepared, or several as one (:func:`oneloop.basics.tensors.together`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)
        self._at_start = set(_buffers(self._model))
        self._reported = rank() > 0  # rank 0 reports, once

    def tensors(self, say: Callable[[str], None]) -> dict[str, Tensor]:
        """Return this rank's small buffers by their names in a checkpoint, not copied.

        Args:
            say: reports, once, buffers that a checkpoint does not hold for each rank.
        """
        own = {}
        lost = []
        for name, buffer in _buffers(self._model).items():
            if _is_small(buffer):
                entry = f"{PREFIX}{rank()}.{name}" + _COMPLEX * buffer.is_complex()
                own[entry] = as_real(buffer.detach())
            elif buffer is not None:
                lost.append(name)
        if lost and not self._reported:
            self._reported = True
            say(
                f"a checkpoint does not hold {', '.join(lost)} of each process; if training "
                "changes them, a resume is not bit-identical"
            )
        return own

    def targets(self, folder: Path) -> dict[str, Tensor]:
        """Give the buffers the shapes of a checkpoint; return them by their names in it.

        A small buffer that it does not list was None at the save, or not registered.

        Args:
            folder: the checkpoint; if it is of another number of ranks, its rank 0 is used.
        """
        # Find the entries of this rank.
        manifest = read_manifest(folder)
        tensors = manifest["tensors"]
        own = rank() if manifest["about"].get("ranks") == ranks() else 0
        saved = {}
        for entry in tensors:
            if entry.startswith(f"{PREFIX}{own}."):
                saved[buffer_in(entry)] = entry

        device = next(self._model.parameters()).device
        targets = {}
        for name in (*_buffers(self._model), *saved):
            path, _, key = name.rpartition(".")
            module = unwrapped(self._model.get_submodule(path))
            held = module._buffers.get(key)
            if name in saved:
                entry = saved[name]
                kind, shape = tensors[entry]
                new = torch.empty(shape, dtype=_DTYPES[kind], device=device)
                if entry.endswith(_COMPLEX):
                    new = torch.view_as_complex(new)
                if held is None:
                    held = new
                    module.register_buffer(key, new, persistent=f"model.{name}" in tensors)
                # A tied buffer is the same tensor, and stays so.
                elif (held.shape, held.dtype) != (new.shape, new.dtype):
                    held.data = new
                targets[entry] = as_real(held)
            elif _is_small(held):
                delattr(module, key)
                if name in self._at_start:
                    module._buffers[key] = None
        return targets


def buffer_in(entry: str) -> str:
    """Return the name of the buffer in ``rank.<number>.<buffer>``."""
    return entry.split(".", 2)[2].removesuffix(_COMPLEX)


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Return all registered buffers by their names without wrappers."""
    found = {}
    for path, module in model.named_modules():
        if module.forward.__module__ not in _NORMS:
            for key, buffer in module._buffers.items():
                found[bare_name(f"{path}.{key}").removeprefix(".")] = buffer
    return found


def _is_small(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a checkpoint has this buffer for each rank."""
    return type(buffer) is Tensor and buffer.nbytes <= _MOST and as_real(buffer).dtype in NAMES
