"""oneloop's real code on fake CUDA tensors, which have sizes but no memory and need no GPU.

Tensors of the host are real.

>>> with fake_cuda() as seen:
...     model = on_cuda(nn.Linear(4, 4))
...     with torch.autocast("cuda", torch.bfloat16):
...         float(model(torch.ones(2, 4, device=CUDA)).sum())
>>> seen.reads
['aten._local_scalar_dense.default: test_x.py:4 <module>']

What is replaced, since it needs a driver: the two functions with which torch asks whether autocast
may be on; the generators of the device, of which there are none; the backward, which gives each
leaf of the graph a gradient of ones; and :class:`DeviceFlag` (pinned memory), which arrives as 0.
So is the function by which transformers recognizes fake tensors: it would not read their values.
The compute capability is that of a plan. cuDNN's attention is off: torch would ask for the model of
the GPU.
Everything else is the code of oneloop, accelerate and torch. Not seen: the operators of a backward,
and which kernel SDPA chooses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import oneloop
from oneloop.basics.device_flag import DeviceFlag
from oneloop.basics.tensors import Planned
from oneloop.launch.processes import Run

CUDA = torch.device("cuda", 0)

_SOURCE = str(Path(oneloop.__file__).parent)
_LIBRARIES = (str(Path(torch.__file__).parent), __file__)
_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_ZEROS = {(True, False): 0.0, (False, False): 0, (False, True): False}  # by (is real, is bool)
_COPIES = (  # operators that copy even a tensor without dimensions
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.where.self,
)


@dataclass(frozen=True)
class Operator:
    """An operator that ran, with the devices and dtypes of its tensors."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Attention:
    """A call of an attention function."""

    name: str  # scaled_dot_product_attention, or torch_attn::_varlen_attn
    mask: tuple[int, ...] | None  # shape of the mask
    causal: bool
    dtype: torch.dtype  # of the query, before autocast


@dataclass
class Seen:
    """What ran on fake CUDA tensors; texts end with the line of oneloop that caused it."""

    mode: FakeTensorMode
    operators: list[Operator] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)  # of torch, as the code calls them
    attention: list[Attention] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)  # between host and device
    reads: list[str] = field(default_factory=list)  # of a device's value by the host
    flags: list[str] = field(default_factory=list)  # numbers that go to the host without a wait
    doubles: list[str] = field(default_factory=list)  # float64 tensors made on the device

    def clear(self) -> None:
        """Forget all but the mode."""
        for name, seen in vars(self).items():
            if name != "mode":
                seen.clear()


class _Operators(TorchDispatchMode):
    """Records every operator; the host reads each value of a device as 0."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self._seen
        given = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        try:
            with _disable_current_modes() if _is_real(given, kwargs) else nullcontext():
                result = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            # The copy of a tensor in host memory was recorded when it was made.
            if any(tensor.is_cuda for tensor in given):
                seen.reads.append(f"{func}: {line()}")
            if func is torch.ops.aten.equal.default:
                return True
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _ZEROS[given[0].dtype.is_floating_point, given[0].dtype is torch.bool]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        self._record(func, given, made)
        return result

    def _record(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        seen = self._seen
        tensors = [*given, *made]
        seen.operators.append(
            Operator(
                str(func),
                tuple(tensor.device.type for tensor in tensors),
                tuple(tensor.dtype for tensor in tensors),
            )
        )
        if func.namespace == "torch_attn":
            seen.attention.append(Attention(func._schema.name, None, True, given[0].dtype))

        # A kernel takes 0-dim tensors of the host as numbers; all others are copied.
        if func in _COPIES:
            several = len({tensor.device.type for tensor in tensors}) > 1
        else:
            several = len({tensor.device.type for tensor in given if tensor.ndim}) > 1
        if several:
            seen.copies.append(f"{func}: {line()}")

        if func.is_view:
            return
        if any(tensor.is_cuda and tensor.dtype is torch.float64 for tensor in made):
            seen.doubles.append(f"{func}: {line()}")


class _Functions(TorchFunctionMode):
    """Records functions of torch before they are decomposed into operators."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._seen.functions.append(getattr(func, "__name__", str(func)))
        if func is F.scaled_dot_product_attention:
            self._seen.attention.append(_sdpa(*args, **kwargs))
        return func(*args, **kwargs)


def _is_real(given: list[Tensor], kwargs: Any) -> bool:
    """Return whether an operator has and makes real tensors only: those of the host are real."""
    on_device = torch.device((kwargs or {}).get("device") or "cpu").type == "cuda"
    return not on_device and not any(isinstance(one, FakeTensor) for one in given)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Attention:
    """Describe a call of scaled_dot_product_attention."""
    mask = None if attn_mask is None else tuple(attn_mask.shape)
    return Attention("scaled_dot_product_attention", mask, is_causal, query.dtype)


def line() -> str:
    """Return the innermost line of oneloop on the stack; else the innermost one outside torch."""
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE):
            return f"{name[len(_SOURCE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if not outside and not name.startswith(_LIBRARIES):
            outside = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return outside


@contextmanager
def fake_cuda(mode: FakeTensorMode | None = None) -> Iterator[Seen]:
    """Make tensors on CUDA fake in this context, and record what runs.

    Args:
        mode: of an earlier context, whose tensors are used again.
    """
    seen = Seen(mode or FakeTensorMode(allow_non_fake_inputs=True))
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        patch("transformers.utils.import_utils.is_fake_tensor", lambda _: False),
        patch("torch.cuda.default_generators", (torch.Generator(),)),
        patch.object(Planned, "capability", (9, 0)),
        patch("torch.autograd.backward", _backward),
        patch("torch.autograd.grad", _grad),
        patch.multiple(
            DeviceFlag,
            __init__=lambda self, device: None,
            send=lambda self, value: seen.flags.append(line()),
            read=lambda self: 0,
        ),
        sdpa_kernel(_NOT_CUDNN),
        seen.mode,
        _Operators(seen),
        _Functions(seen),
    ):
        yield seen


def on_cuda(model: nn.Module) -> nn.Module:
    """Replace parameters and buffers by fake ones on CUDA, in place; shared ones stay shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    new = torch.empty_like(tensor, device=CUDA)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    moved[id(tensor)] = new
                held[name] = moved[id(tensor)]
    return model


@contextmanager
def fake_run(precision: str = "no") -> Iterator[Run]:
    """Yield the only process of a run on fake CUDA, as the launcher configures accelerate.

    Call :func:`on_cuda` before its ``prepare``: accelerate cannot move fake tensors.

    Args:
        precision: no, bf16 or fp16 (accelerate's mixed_precision).
    """
    variables = {"ACCELERATE_TORCH_DEVICE": str(CUDA), "ACCELERATE_MIXED_PRECISION": precision}
    AcceleratorState._reset_state(True)
    try:
        with patch.dict(os.environ, variables):
            accelerator = Accelerator(device_placement=False, step_scheduler_with_optimizer=False)
            yield Run(accelerator)
    finally:
        AcceleratorState._reset_state(True)


def leaves(tensors: Any) -> list[Tensor]:
    """Return the tensors to which a backward from these tensors would add gradients."""
    found: dict[int, Tensor] = {}
    waiting = [tensor.grad_fn for tensor in tree_leaves(tensors)]
    known = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        for after, _ in getattr(node, "next_functions", ()):
            if after is not None and after not in known:
                known.add(after)
                waiting.append(after)
    return [*found.values()]


def _backward(tensors: Any, *_: Any, **__: Any) -> None:
    for leaf in leaves(tensors):
        leaf.grad = torch.ones_like(leaf) if leaf.grad is None else leaf.grad + 1


def _grad(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(torch.ones_like(tensor) for tensor in tree_leaves(inputs))
