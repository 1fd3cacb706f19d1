"""Shards of tensors and their names under DDP and FSDP2, and buffers that all ranks share."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name

# class attribute: names of parameters that are stored with the shape (1,)
_SCALARS = "_oneloop_scalars"


class Planned:
    """The GPU of a plan: tensors on the CPU stand for tensors on it."""

    capability: tuple[int, int] | None = None  # its compute capability; None: nothing is planned
    fp16 = False  # whether the planned run has fp16 loss scaling


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is, or stands for one, on a CUDA device."""
    return tensor.device.type == "cuda" or Planned.capability is not None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU of NVIDIA, or of the GPU of a plan; else (0, 0)."""
    if Planned.capability is not None:
        return Planned.capability
    if device.type != "cuda" or torch.version.hip:  # the numbers of AMD have another meaning
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps between its elements, in any order of dimensions."""
    packed = torch.empty_like(tensor, device="meta").stride()
    strides = zip(tensor.stride(), packed, tensor.size(), strict=True)
    return all(own == other or size == 1 for own, other, size in strides)


def first_element(tensor: Tensor) -> int:
    """Return the index of the first element of this rank's shard in the flat tensor.

    Raise ValueError unless the sharding is by rows over one mesh dimension.
    """
    if not isinstance(tensor, DTensor):
        return 0
    if len(tensor.placements) != 1 or not tensor.placements[0].is_shard(0):
        raise ValueError(
            f"the sharding {tensor.placements} is not supported; expected dim 0 over a 1-D mesh"
        )
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[0]) * math.prod(tensor.shape[1:])


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real view of shape (…, 2), any other unchanged.

    Files have no complex dtypes.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def optimized(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Return the optimizer's parameters in its order: bare name, parameter, parameter group.

    Raise Inexact if the model no longer has one of them.
    """
    names = {parameter: bare_name(name) for name, parameter in model.named_parameters()}
    known = {one for group in optimizer.param_groups for one in group["params"]}
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                new = [names[one] for one in names if one.requires_grad and one not in known]
                raise Inexact(
                    "the model has lost a parameter of the optimizer, because the task or the "
                    f"model has replaced or tied it (new parameters: {', '.join(new) or 'none'}); "
                    "assign new values to it in place"
                )
            found.append((names[parameter], parameter, group))
    return found


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors (not copies) by ``optimizer.<parameter>.<key>``."""
    tensors = {}
    for name, parameter, _ in optimized(model, optimizer):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = as_real(value.detach())
    return tensors


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered.

    Only a backward does that for the root module.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def recovered(model: nn.Module) -> bool:
    """Return whether the model can be used after a forward that failed.

    FSDP2 can reset its state since torch 2.15.
    """
    if not isinstance(model, FSDPModule):
        return True
    reset: Any = getattr(model, "reset_iter_state", None)
    if reset is None:
        return False
    reset()
    return True


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, 1-D; they may share its memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def is_alone() -> bool:
    """Return whether the run has only one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


@torch.no_grad()
def gathered(own: Tensor) -> Tensor:
    """Return the rows of all ranks, in order of rank. Collective: call on every rank.

    They are sent as bytes: no backend supports all dtypes, and every bit is kept.

    Args:
        own: this rank's rows; shape and dtype must be equal on all ranks.
    """
    if is_alone():
        return own
    ranks = dist.get_world_size()
    sent = as_bytes(own)
    received = sent.new_empty(ranks * len(sent))
    if len(sent):
        dist.all_gather_into_tensor(received, sent)
    return received.view(own.dtype).view(ranks * len(own), *own.shape[1:])


@torch.no_grad()
def summed(own: Tensor) -> Tensor:
    """Return the sum over all ranks, in the same dtype. Collective: call on every rank.

    Args:
        own: a tensor of any dtype; shape and dtype must be equal on all ranks.
    """
    if is_alone():
        return own

    # Backends do not support all dtypes. A sum over ranks must not round between them, either.
    wide = as_real(own)
    if not own.is_floating_point() and not own.is_complex():
        wide = own.long()
    elif own.element_size() < 4:
        wide = own.float()
    total = wide.clone()
    dist.all_reduce(total)
    if own.is_complex():
        return torch.view_as_complex(total)
    return total.to(own.dtype)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank, in one broadcast. Collective.

    The model may be bare, DDP or FSDP2.
    """
    if is_alone():
        return
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if not buffers:
        return

    # Join the bytes of all buffers, whatever their dtypes.
    flat = [as_bytes(buffer) for buffer in buffers]
    joined = torch.cat(flat)
    dist.broadcast(joined, src=0)
    for buffer, got in zip(buffers, joined.split([len(own) for own in flat]), strict=True):
        # the clone is aligned for every dtype
        buffer.copy_(got.clone().view(buffer.dtype).view(buffer.shape))


def one_element(model: nn.Module) -> None:
    """Store each 0-dim parameter with the shape (1,), in place, since FSDP2 cannot shard a scalar.

    In the forward, the module's attribute is still 0-dim: a view, defined by a subclass of the same
    name.
    """
    # Find them before the first change: a tied one belongs to several modules.
    found = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.ndim:
                found.append((module, name, parameter))

    # Replace the class of each module by a subclass with a property of this name.
    for module, name, parameter in found:
        parameter.data = parameter.data.reshape(1)
        kind = type(module)
        own = {
            "__module__": kind.__module__,
            _SCALARS: [*getattr(module, _SCALARS, ()), name],
            name: property(partial(_as_scalar, name)),
        }
        module.__class__ = type(kind.__name__, (kind,), own)


def _as_scalar(name: str, module: nn.Module) -> Tensor:
    held: Any = module._parameters[name]
    # FSDP2 itself looks for its shard.
    return held if isinstance(held, DTensor) else held.reshape(())


def scalar_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that :func:`one_element` changed."""
    names = set()
    for prefix, module in model.named_modules():
        for name in getattr(module, _SCALARS, ()):
            names.add(bare_name(f"{prefix}.{name}".lstrip(".")))
    return names


def of_shape(target: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of a one-element tensor in its saved shape, () or (1,).

    Any other tensor is unchanged. On a rank without the element of a DTensor, return a new tensor,
    which is not used.
    """
    if {tuple(shape), tuple(target.shape)} != {(), (1,)}:
        return target
    own = local(target)
    return own.reshape(tuple(shape)) if own.numel() else own.new_zeros(tuple(shape))


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that accelerate's ``prepare`` has wrapped; any other unchanged.

    Hooks and attributes of the wrapper would have no effect on the update.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        return plain_optimizer(optimizer.optimizer)
    return optimizer
