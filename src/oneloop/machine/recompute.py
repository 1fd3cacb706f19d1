"""Activation (gradient) checkpointing for any model, without changes to its code.

>>> recompute(model, "full")            # before accelerator.prepare; state-dict names stay the same

Results are bit-identical, dropout and BatchNorm included: the random states and buffers of the
forward are restored for the recomputation, which changes neither. (Chen et al. 2016; selective:
Korthikanti et al. 2022, as in torch.utils.checkpoint.)
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import other_states, others_seeded, set_other_states
from oneloop.machine.blocks import blocks

_KEPT = {
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten.convolution",
    "aten._scaled_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "torch_attn._varlen_attn",  # attention in packed rows
}
"""matrix products, convolutions and attention: few operations, and expensive to recompute"""


_MODES = re.compile(r"none|full|selective|every:[1-9]\d*|budget:(0|1|0?\.\d+|1\.0+)")


def recompute(
    model: nn.Module, mode: str = "full", *, names: Sequence[str] = (), offload: bool = False
) -> int:
    """Apply activation checkpointing to blocks of ``model``, in place.

    Args:
        model: not yet wrapped, sharded or compiled.
        mode: ``none``; ``full``: keep only each block's input; ``every:K``: the same for each K-th
            block; ``selective``: also keep the results of matrix products, and of attention
            without dropout; ``budget:SHARE``: the compiler keeps this share of the activations.
        names: class names of the blocks; see :func:`oneloop.machine.blocks.blocks`.
        offload: keep the inputs in pinned host memory; not for ``selective``.

    Returns:
        the number of blocks that recompute.

    Raises:
        ValueError: the mode is unknown, the model has no (or too few) blocks, or offload does not
            fit the mode.
    """
    if not _MODES.fullmatch(mode):
        raise ValueError(
            f"recompute {mode!r} is unknown; known: none, full, every:K (a whole number), "
            "selective, and budget:SHARE (0 to 1)"
        )
    kind, _, number = mode.partition(":")
    if offload and kind not in ("full", "every"):
        raise ValueError(
            f"offload requires recompute full or every:K, which keep a block's input alone; got "
            f"{mode}"
        )
    if kind == "budget":  # the compiler itself recomputes
        torch._functorch.config.activation_memory_budget = float(number)
    if kind in ("none", "budget"):
        return 0

    # Choose the blocks.
    layers = blocks(model, names)
    if not layers:
        raise ValueError(
            f"recompute {mode}: {type(model).__name__} has no repeated blocks; set machine.blocks, "
            "or machine.recompute none"
        )
    step = int(number) if kind == "every" else 1
    chosen = layers[step - 1 :: step]
    if not chosen:
        raise ValueError(
            f"recompute {mode}: {type(model).__name__} has only {len(layers)} blocks; choose a "
            "smaller K"
        )

    # Replace their forward.
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps)
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            # torch 2.15: hooks can count and offload kept tensors
            options["respect_saved_tensors_hooks"] = True
    names_of = {module: bare_name(name) for name, module in model.named_modules()}
    for block in chosen:
        inside = {module: names_of[module] for module in block.modules()}
        forward = _recomputing(block.forward, inside, options, offload=offload)
        block.forward = forward  # type: ignore[method-assign]
    return len(chosen)


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept for the backward.

    Not that of attention with dropout: its kernel draws random numbers on a GPU. If the
    recomputation left it out, all later dropout in the block would draw other numbers.

    Args:
        context: torch's, unused.
        operation: the operation.
        args: of its call.
        kwargs: of its call.
    """
    name = str(operation).rpartition(".")[0]
    if name in _KEPT:
        names = [argument.name for argument in operation._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        if not named.get("dropout_p"):
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _saved(modules: Iterable[nn.Module], *, copied: bool) -> Callable[[], None]:
    """Save what a forward reads besides its inputs and torch's own generators.

    Return a function that restores it.

    Args:
        modules: their buffers are saved, and the states of an Apple GPU's generator and, if they
            are seeded, of numpy's and Python's.
        copied: copy the statistics of batches, which a forward changes.
    """
    others = other_states() if others_seeded() else None
    apple = [torch.mps.get_rng_state() for _ in range(torch.mps.device_count())]  # one, or none
    buffers = []
    for module in modules:
        for key, buffer in module._buffers.items():
            buffers.append((module, key, _statistics(module, buffer) if copied else buffer))

    def restore() -> None:
        if others is not None:
            set_other_states(others)
        for state in apple:
            torch.mps.set_rng_state(state)
        for module, key, buffer in buffers:
            module._buffers[key] = _statistics(module, buffer) if copied else buffer

    return restore


def _statistics(module: nn.Module, buffer: Tensor | None) -> Tensor | None:
    """Return a copy of statistics of batches, which a forward changes; any other buffer itself."""
    if buffer is None or not isinstance(module, _NormBase):
        return buffer
    return buffer.detach().clone()


def _repeatable(
    forward: Callable[..., Any],
    inside: Mapping[nn.Module, str],
) -> Callable[..., Any]:
    """Return a function for one call of a block's forward, and its recomputations.

    A recomputation repeats the forward bit for bit. torch restores its own generators for it, but
    not that of an Apple GPU. This restores it, the buffers that the forward had and, if they are
    seeded, the generators of numpy and Python. Afterwards it undoes what the recomputation changed.

    Args:
        forward: of the block. It may change in place only statistics of batches.
        inside: names of the block's modules.
    """
    restore: Callable[[], None] | None = None  # the state before the forward

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal restore
        if restore is not None:
            undo = _saved(inside, copied=False)
            restore()
            try:
                return forward(*args, **kwargs)
            finally:
                undo()

        restore = _saved(inside, copied=True)
        versions = []
        for module, name in inside.items():
            for key, buffer in module._buffers.items():
                if buffer is not None and not isinstance(module, _NormBase):
                    versions.append((f"{name}.{key}", buffer, buffer._version))
        result = forward(*args, **kwargs)
        for name, buffer, version in versions:
            if buffer._version != version:
                raise Inexact(
                    "machine.recompute runs the forward of a block twice, but it changes the "
                    f"buffer {name} in place, so the second result may differ; set "
                    "machine.recompute none, set machine.blocks to smaller blocks without it, or "
                    "change the buffer outside of the block"
                )
        return result

    return call


def _recomputing(
    forward: Callable[..., Any],
    inside: Mapping[nn.Module, str],
    options: Mapping[str, Any],
    *,
    offload: bool,
) -> Callable[..., Any]:
    @wraps(forward)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A compiled block restores its state by itself.
        call = forward if torch.compiler.is_compiling() else _repeatable(forward, inside)
        if not offload:
            return checkpoint(call, *args, **options, **kwargs)

        # Keep the inputs on the device until the forward has used them.
        inputs = [_Offloaded(value) if torch.is_tensor(value) else value for value in args]
        result = checkpoint(_forward_on_device, call, inputs, **options, **kwargs)
        for value in inputs:
            if isinstance(value, _Offloaded):
                value.offload()
        return result

    return inner


def _forward_on_device(forward: Callable[..., Any], inputs: list[Any], **kwargs: Any) -> Any:
    on_device = [one.on_device() if isinstance(one, _Offloaded) else one for one in inputs]
    return forward(*on_device, **kwargs)


class _Offloaded:
    """A block's input: the tensor in the forward, then a copy in host memory until the backward."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad

    def on_device(self) -> Tensor:
        tensor = self._tensor.to(self._device, non_blocking=True)
        return tensor.requires_grad_(self._requires_grad)

    def offload(self) -> None:
        pinned = self._device.type == "cuda"
        copy = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, pin_memory=pinned)
        # On the compute stream, so that the copy is ordered with the kernels that write this
        # memory.
        self._tensor = copy.copy_(self._tensor.detach(), non_blocking=pinned)
