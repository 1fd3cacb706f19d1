"""What a tensor is called, and which part of it a rank holds, under every strategy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from oneloop.basics.names import bare_name


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps between its elements, in whatever order they are stored."""
    packed = torch.empty_like(tensor, device="meta").stride()
    return all(a == b or size == 1 for a, b, size in zip(tensor.stride(), packed, tensor.size(), strict=True))


def first_element(tensor: Tensor) -> int:
    """Return the index of the first element of this rank's shard in the flat tensor. Raises ValueError unless the
    sharding is by rows over one mesh dimension."""
    if not isinstance(tensor, DTensor):
        return 0
    if len(tensor.placements) != 1 or not tensor.placements[0].is_shard(0):
        raise ValueError(f"a tensor is sharded as {tensor.placements}, and by rows over one dimension is known")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0]) * math.prod(tensor.shape[1:])


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a real view of it, of shape (…, 2), for files that hold no complex numbers; others as is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def optimized(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """The optimizer's parameters in its own order: bare name, parameter, its group."""
    names = {parameter: bare_name(name) for name, parameter in model.named_parameters()}
    return [(names[p], p, group) for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``optimizer.<parameter>.<key>``; the tensors themselves, not copies."""
    return {
        f"optimizer.{name}.{key}": as_real(value.detach())
        for name, parameter, _ in optimized(model, optimizer)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }
