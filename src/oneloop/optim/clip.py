"""The global gradient norm and gradient clipping, for plain, DDP and FSDP2 models."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from oneloop.basics.exact_sums import exact_norm
from oneloop.basics.tensors import local


@torch.no_grad()
def global_norm(parameters: Iterable[Tensor], *, exact: bool = False) -> Tensor:
    """Return the L2 norm of all gradients: a plain 0-dim tensor, equal on every rank.

    Collective: call on every rank. Sharded gradients (FSDP2) cost one small all-reduce; other
    gradients are already reduced.

    Args:
        parameters: their ``.grad`` is read.
        exact: round once, at the end: bit-identical for every sharding. Sharded gradients then cost
            two all-reduces.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    shards = [local(gradient) for gradient in sharded]

    # Add integers: the order of the ranks does not matter.
    if exact and gradients:
        group = sharded[0].device_mesh.get_group() if sharded else None
        norm = exact_norm(whole, shards, group)
        return norm.to(gradients[0].dtype)

    # Unsharded gradients need no exchange.
    norm = _norm(whole)
    if not sharded:
        return norm

    # Sum the squares over the ranks that hold shards. With HSDP, replicas hold equal shards.
    square = _norm(shards).square()
    mesh = sharded[0].device_mesh
    for dimension, placement in enumerate(sharded[0].placements):
        if placement.is_shard():
            dist.all_reduce(square, group=mesh.get_group(dimension))
    square = square + norm.to(square.device).square()
    return square.sqrt()


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return torch's get_total_norm, bit-identically.

    If all tensors share device and dtype, they need not be sorted by them.
    """
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        return get_total_norm(tensors, foreach=True)
    norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    return norms


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], largest: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their global norm is at most ``largest``.

    Args:
        parameters: their ``.grad`` is scaled.
        largest: 0: no clipping.
        norm: the global norm, 0-dim.
    """
    if not largest:
        return
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor)


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set all gradients to None, without the profiler record of ``zero_grad()`` (8 us)."""
    for parameter in parameters:
        parameter.grad = None
