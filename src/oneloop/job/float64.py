"""Run a model with float64 copies of its weights, without copying the model.

The copies take the places of parameters and buffers in the modules. So code that keeps a reference
to the model or to a module, such as activation checkpointing, uses them, too.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from oneloop.basics.tensors import reshard, sharded_units
from oneloop.basics.wide_sums import wide_dtype

MOST = 1_000_000_000  # bytes of the copies
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class NotInFloat64(ValueError):
    """A model that cannot run with float64 copies of its weights."""


def batch_in_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its float32 tensors in float64, as with machine.dtype float64."""
    wide = {}
    for name, value in batch.items():
        is_float = isinstance(value, Tensor) and value.dtype is torch.float32
        wide[name] = value.double() if is_float else value
    return wide


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Hold float64 copies of all parameters and buffers in this context; compute in float64.

    Collective under FSDP2: call on every rank. Every rank then holds the whole model, and its
    units gather nothing.

    Args:
        model: bare, or sharded by FSDP2.

    Raises:
        NotInFloat64: the copies are too large, or cannot replace the tensors.
    """
    reshard(model)
    _reject(model)
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        # The copies are whole, so no unit gathers.
        for unit in sharded_units(model):
            stack.enter_context(_without_gathering(unit))

        # One copy of each tensor, also if several modules share it.
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            for name, parameter in [*module._parameters.items()]:
                if parameter is not None:
                    copy = _copy(parameter, copies)
                    stack.callback(setattr, module, name, parameter)
                    # not in _parameters: recurrent layers keep a list of their weights
                    setattr(module, name, copy)
            for name, buffer in [*module._buffers.items()]:
                if buffer is not None:
                    stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = _copy(buffer, copies)

        # Numbers, and conversions to float32 in the model's code, are in float64, too.
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        with _Wide():  # type: ignore[no-untyped-call]
            yield


def _reject(model: nn.Module) -> None:
    """Raise NotInFloat64 if the model is too large, or has tensors that cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(8 * tensor.numel() for tensor in tensors)
    if size > MOST:
        raise NotInFloat64(f"the copies would have {size:,} bytes; the limit is {MOST:,}")
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter)
        if not plain and not isinstance(tensor, DTensor):
            raise NotInFloat64(f"a tensor of the class {type(tensor).__name__} cannot be copied")
        if tensor.is_meta or wide_dtype(tensor.device) is not torch.float64:
            raise NotInFloat64(f"{tensor.device.type} has no float64")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise NotInFloat64("a parameter has a gradient hook, which its copy would not have")


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """Return the copy of a tensor; make it if there is none."""
    if id(tensor) not in copies:
        whole: Any = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        copy = whole.to(_WIDER.get(whole.dtype, whole.dtype))
        # what the forward changes is never the model's own tensor
        copy = copy.clone() if copy is whole else copy
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = copy
    return copies[id(tensor)]


@contextmanager
def _without_gathering(module: Any) -> Iterator[None]:
    """Remove FSDP2's hooks from the forward of a unit."""
    before = module._forward_pre_hooks, module._forward_hooks
    kept = []
    for own in before:
        others = [(key, hook) for key, hook in own.items() if not _is_of_fsdp(hook)]
        if len(others) == len(own):
            raise NotInFloat64("FSDP2's hooks are not known")
        kept.append(OrderedDict(others))
    module._forward_pre_hooks, module._forward_hooks = kept
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


class _Wide(TorchDispatchMode):
    """Convert to double precision where code asks for less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **_widened(kwargs or {}))


def _widened(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation, with double precision instead of less."""
    asked = named.get("dtype")
    return {**named, "dtype": _WIDER[asked]} if asked in _WIDER else named
