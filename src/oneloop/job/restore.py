"""Restore what a dry run changes: gradients, tensors, generators, and attributes of objects."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import has_drawn, random_states, restored_generators
from oneloop.basics.snapshot import Snapshot
from oneloop.basics.tensor_hash import as_bits, tensor_hashes
from oneloop.basics.tensors import local, reshard

__all__ = [
    "KeptTensors",
    "all_restored",
    "contents_of",
    "has_drawn",
    "random_states",
    "restored",
    "restored_buffers",
]

_COPIED = 1 << 30  # bytes of parameters and buffers that are copied; larger models are hashed


def contents_of(model: nn.Module) -> dict[str, int]:
    """Return hashes of buffers and parameters (this rank's shards) by name. Host sync."""
    reshard(model)
    tensors = {f"buffer {bare_name(name)}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        tensors[f"parameter {bare_name(name)}"] = local(parameter.detach())
    return dict(zip(tensors, tensor_hashes(tensors.values()), strict=True))


class KeptTensors:
    """The contents of a model's parameters and buffers at a moment.

    Args:
        model: bare, or sharded by FSDP2.
        most: bytes that are copied; of a larger model there are only hashes, so that a change is
            found, but not undone.
    """

    def __init__(self, model: nn.Module, *, most: int = _COPIED) -> None:
        self._tensors: dict[str, Tensor] = {}  # in the memory of this moment
        self._owners: dict[str, Tensor] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._tensors[bare_name(name)] = local(tensor.detach())
            self._owners[bare_name(name)] = tensor
        size = sum(one.numel() * one.element_size() for one in self._tensors.values())
        self._copies: dict[str, Tensor] = {}
        self._hashes: list[int] = []
        if size <= most:
            self._copies = {name: tensor.clone() for name, tensor in self._tensors.items()}
        else:
            self._hashes = tensor_hashes(self._tensors.values())

    def changed(self) -> list[str]:
        """Return the names of tensors whose contents, or memory, are others now. Host sync."""
        names = [name for name in self._owners if self._is_elsewhere(name)]
        for name, copy in self._copies.items():
            if not torch.equal(as_bits(self._now(name)), as_bits(copy)):
                names.append(name)
        if self._hashes:
            now = tensor_hashes(map(self._now, self._owners))
            for name, before, after in zip(self._owners, self._hashes, now, strict=True):
                if before != after:
                    names.append(name)
        return [*dict.fromkeys(names)]

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore the contents. Host sync.

        Returns:
            The names of tensors that have changed, but were not copied.
        """
        # Return to the memory of then, after an assignment to .data.
        for name, owner in self._owners.items():
            if self._is_elsewhere(name):
                owner.data = self._tensors[name]

        lost = []
        for name in self.changed():
            if name in self._copies:
                self._now(name).copy_(self._copies[name])
            else:
                lost.append(name)
        return lost

    def _now(self, name: str) -> Tensor:
        return local(self._owners[name].detach())

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a tensor (none of FSDP2's) has another memory now."""
        owner = self._owners[name]
        moved = self._now(name).data_ptr() != self._tensors[name].data_ptr()
        return moved and not isinstance(owner, DTensor)


@contextmanager
def all_restored(
    model: nn.Module, device: torch.device, others: Mapping[str, Any]
) -> Iterator[Snapshot]:
    """Restore on exit what a dry run changes: :func:`restored`, parameters and attributes.

    Yield the attributes as they were.

    Args:
        model: bare, or sharded by FSDP2.
        device: of the run.
        others: more objects by name, such as the task and its data sets.
    """
    reshard(model)
    kept = KeptTensors(model)
    snapshot = Snapshot({"model": model, **others})
    with restored(model, device):
        try:
            yield snapshot
        finally:
            reshard(model)
            snapshot.restore()
            if lost := kept.restore():
                raise BadInput(
                    f"a forward changes {lost[0]}, which the check before a run cannot undo: only "
                    f"{_COPIED / 1e9:.1f} GB of parameters and buffers are copied; change it "
                    "outside of the forward"
                )


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore gradients (None), buffers and random states on exit."""
    try:
        with restored_generators(device), restored_buffers(model):
            yield
    finally:
        reshard(model)
        for parameter in model.parameters():
            parameter.grad = None


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers on exit."""
    buffers = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                # a forward may have replaced the tensor
                module._buffers[name] = buffer.copy_(before)
