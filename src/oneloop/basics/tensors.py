"""Shards of tensors and their names under DDP and FSDP2, and buffers that all ranks share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name

# class attribute: names of parameters that are stored with the shape (1,)
_SCALARS = "_oneloop_scalars"

Models = nn.Module | Mapping[str, nn.Module]
"""a model, or several by name, such as the networks of a GAN"""
Optimizers = Optimizer | Mapping[str, Optimizer]
"""an optimizer, or several by name"""


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
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real view of shape (…, 2), any other unchanged.

    Files have no complex dtypes.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class NamedModels(nn.Module):
    """Several models by name, as the modules of one model; see :func:`together`."""


def together(models: Models) -> nn.Module:
    """Return one model that has the tensors of several, in the order of their names.

    Wrappers of DDP and torch.compile are left out, so that a parameter is called
    ``<model>.<parameter>``. Modules and tensors are not copied. One model is returned unchanged.

    torch raises KeyError or TypeError if a name cannot be that of a module.
    """
    if isinstance(models, nn.Module):
        return models
    holder = NamedModels()
    for name, model in sorted(models.items()):
        holder.add_module(name, unwrapped(model))
    return holder


def unwrapped(model: nn.Module) -> nn.Module:
    """Return a model or a module without wrappers, in any order.

    These are DDP, torch.compile and activation checkpointing.
    """
    inner: Any = model._modules.get("_orig_mod", model)
    inner = inner._modules.get("_checkpoint_wrapped_module", inner)
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return inner if inner is model else unwrapped(inner)


def optimizers_of(optimizer: Optimizers) -> list[tuple[str, Optimizer]]:
    """Return the names and optimizers, in the order of the names; one optimizer has the name ''."""
    return sorted(optimizer.items()) if isinstance(optimizer, Mapping) else [("", optimizer)]


def optimized(
    model: nn.Module, optimizer: Optimizers
) -> list[tuple[str, Tensor, dict[str, Any], Optimizer]]:
    """Return the parameters of one or several optimizers, in their order.

    Returns:
        For each parameter: its bare name, itself, its parameter group, its optimizer.

    Raises:
        Inexact: the model no longer has one of them.
        ValueError: none of several models has one of them, or two optimizers have the same.
    """
    # Find each parameter's name and optimizer.
    names = {parameter: bare_name(name) for name, parameter in model.named_parameters()}
    found = []
    owners: dict[Tensor, str] = {}
    for owner, one in optimizers_of(optimizer):
        for group in one.param_groups:
            for parameter in group["params"]:
                name = names.get(parameter, "")
                other = owners.setdefault(parameter, owner)
                if other != owner:
                    raise ValueError(
                        f"the optimizers {other} and {owner} both have the parameter {name}, but a "
                        "checkpoint holds one state for each parameter; give it to one of them"
                    )
                found.append((name, parameter, group, one))

    # Reject parameters that the model does not have.
    lost = owners.keys() - names.keys()
    if lost and isinstance(model, NamedModels):
        raise ValueError(
            f"an optimizer has {len(lost)} parameters that are not in the given models "
            f"({', '.join(model._modules)}); give all models of its parameters by name, and "
            "assign new values to parameters in place"
        )
    if lost:
        new = [names[one] for one in names if one.requires_grad and one not in owners]
        raise Inexact(
            "the model has lost a parameter of the optimizer, because the task or the "
            f"model has replaced or tied it (new parameters: {', '.join(new) or 'none'}); "
            "assign new values to it in place"
        )
    return found


def groups_of(optimizer: Optimizers) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return the parameter groups of all optimizers, each with its optimizer."""
    found = []
    for _, one in optimizers_of(optimizer):
        found += [(one, group) for group in one.param_groups]
    return found


def kinds_of(optimizer: Optimizers) -> list[str]:
    """Return the names of the optimizers' classes, in the order of their names."""
    return [type(plain_optimizer(one)).__name__ for _, one in optimizers_of(optimizer)]


def named(model: nn.Module, optimizer: Optimizers | None) -> list[str]:
    """Describe the models and the optimizers that have names, for a manifest.

    Returns:
        The names of models; name, class and parameters of optimizers.
    """
    lines = []
    if isinstance(model, NamedModels):
        lines += [f"model {name}" for name in model._modules]
    if isinstance(optimizer, Mapping):
        reshard(model)  # after a forward, the root of FSDP2 may have other parameters
        parameters = optimized(model, optimizer)
        for name, one in optimizers_of(optimizer):
            kind = type(plain_optimizer(one)).__name__
            lines.append(f"optimizer {name}: {kind}, parameter groups: {len(one.param_groups)}")
            for parameter, _, _, owner in parameters:
                if owner is one:
                    lines.append(f"optimizer {name}: {parameter}")
    return lines


def sharded_units(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards, and gathers, as a unit; none without FSDP2."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered.

    Only a backward does that for the root module.
    """
    for unit in sharded_units(model):
        unit.reshard()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, 1-D; they may share its memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def is_alone() -> bool:
    """Return whether the run has only one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def replica_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold the same parameters as this rank.

    Return None if there is no other.
    """
    if is_alone():
        return None
    parameter = next(iter(model.parameters()))
    if not isinstance(parameter, DTensor):
        return dist.group.WORLD
    mesh = parameter.device_mesh
    along = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    if along and mesh.size(along[0]) > 1:
        return mesh.get_group(along[0])
    return None


def host_group() -> Any:
    """Return a group of all ranks on the host, whose collectives may wait for a day. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


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
def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank, in one broadcast. Collective.

    The model may be bare, DDP or FSDP2.
    """
    if is_alone():
        return
    # torch joins the bytes of all buffers, whatever their dtypes.
    buffers = [*model.buffers()]
    received = [as_bytes(buffer) for buffer in buffers]
    if received:
        group = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, received, 1 << 28, 0)  # type: ignore[attr-defined]
    for buffer, content in zip(buffers, received, strict=True):
        buffer.copy_(content.view(buffer.dtype).view(buffer.shape))


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
