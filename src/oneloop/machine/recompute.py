"""Activation (gradient) checkpointing for any model, without changes to its code.

>>> recompute(model, "full")            # before accelerator.prepare; state-dict names stay the same

Results are bit-identical, dropout and BatchNorm included: the random states and buffers of the
forward are restored for the recomputation, which changes neither. (Chen et al. 2016; selective:
Korthikanti et al. 2022, as in torch.utils.checkpoint.)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
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

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""aten's matrix products, convolutions and attention: few operations, and expensive to recompute"""


def recompute(
    model: nn.Module, mode: str = "full", *, names: Sequence[str] = (), offload: bool = False
) -> int:
    """Apply activation checkpointing to blocks of ``model``, in place.

    Args:
        model: not yet wrapped, sharded or compiled.
        mode: ``none``; ``full``: keep only each block's input; ``every:K``: the same for each K-th
            block; ``selective``: also keep the results of matrix products, and of attention
            without dropout.
        names: class names of the blocks; see :func:`oneloop.machine.blocks.blocks`.
        offload: keep the inputs in pinned host memory; not for ``selective``.

    Returns:
        the number of blocks that recompute.

    Raises:
        ValueError: the mode is unknown, the model has no (or too few) blocks, or offload does not
            fit the mode.
    """
    # The compiler itself recomputes for a budget.
    kind, share = parsed(mode)
    if kind in ("none", "budget"):
        if offload:
            raise ValueError(
                f"offload requires recompute full or every:K, got {mode}, which keeps nothing "
                "by block"
            )
        return 0

    # Choose the blocks.
    layers = blocks(model, names)
    if not layers:
        raise ValueError(
            f"recompute {mode}: {type(model).__name__} has no repeated blocks; set machine.blocks, "
            "or machine.recompute none"
        )
    if offload and kind == "selective":
        raise ValueError("offload does not work with recompute selective; use full or every:K")
    step = int(share) if kind == "every" else 1
    chosen = layers[step - 1 :: step]
    if not chosen:
        raise ValueError(
            f"recompute {mode}: {type(model).__name__} has only {len(layers)} blocks; choose a "
            "smaller K"
        )

    # Replace their forward.
    contexts = None
    if kind == "selective":
        policy = partial(_keeps, frozenset(_kept_operations()))
        contexts = partial(create_selective_checkpoint_contexts, policy)
    names_of = {module: name for name, module in model.named_modules()}
    for block in chosen:
        inside = [_Inside(names_of[one], one._buffers, one) for one in block.modules()]
        forward = _recomputing(block.forward, inside, contexts, offload=offload)
        block.forward = forward  # type: ignore[method-assign]
    return len(chosen)


def parsed(mode: str) -> tuple[str, float]:
    """Parse a mode as ("full", 0), ("every", K), ("budget", share) …

    Raise ValueError if it is unknown.
    """
    # Split the mode into kind and share.
    kind, colon, text = mode.partition(":")
    share = 0.0
    if colon:
        try:
            share = float(text)
        except ValueError:
            share = -1.0

    # Only two kinds take a share.
    if kind == "every":
        valid = share >= 1 and share.is_integer()
    elif kind == "budget":
        valid = bool(colon) and 0 <= share <= 1
    else:
        valid = kind in ("none", "full", "selective") and not colon
    if not valid:
        raise ValueError(
            f"recompute {mode!r} is unknown; known: none, full, every:K (a whole number), "
            "selective, and budget:SHARE (0 to 1)"
        )
    return kind, share


def _kept_operations() -> list[Any]:
    """Return the operators of ``_KEPT``, and attention in packed rows."""
    import torch.nn.attention.varlen  # registers its operator

    found = []
    for namespace, names in ((torch.ops.aten, _KEPT), (torch.ops.torch_attn, ("_varlen_attn",))):
        for name in names:
            if hasattr(namespace, name):
                packet = getattr(namespace, name)
                found += [getattr(packet, kind) for kind in packet.overloads() if kind != "out"]
    return found


def _keeps(
    kept: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return whether the result of an operation is kept for the backward.

    Not that of attention with dropout: its kernel draws random numbers on a GPU. If the
    recomputation left it out, all later dropout in the block would draw other numbers.

    Args:
        kept: operations whose results are kept.
        context: torch's, unused.
        operation: the operation.
        args: of its call.
        kwargs: of its call.
    """
    if operation not in kept or _dropout(operation, args, kwargs) > 0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _dropout(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the probability of dropout inside of an operation."""
    for number, argument in enumerate(operation._schema.arguments):
        if argument.name != "dropout_p":
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name, 0.0)
        return float(given)
    return 0.0


class _Inside(NamedTuple):
    """A module of a block, and its buffers."""

    name: str
    buffers: dict[str, Tensor | None]
    module: nn.Module


def _apple_states() -> list[Tensor]:
    return [torch.mps.get_rng_state() for _ in range(torch.mps.device_count())]


class _Call:
    """One call of a block's forward, which its recomputation repeats bit for bit.

    torch restores its own generators for the recomputation, but not that of an Apple GPU. This
    restores it, the buffers that the forward had and, if they are seeded, the generators of numpy
    and Python. Afterwards it undoes what the recomputation changed.

    Args:
        forward: of the block.
        inside: the modules of the block.
    """

    def __init__(self, forward: Callable[..., Any], inside: Sequence[_Inside]) -> None:
        self._forward = forward
        self._inside = inside
        self._ran = False
        self._states: tuple[Any, ...] | None = None  # of the generators, before the forward
        self._apple: list[Tensor] = []  # the same of each Apple GPU: one, or none
        # of each buffer before it: where it is, its key, the tensor, and whether it is copied
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, bool]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._first(*args, **kwargs)

        # Recompute with the random states and buffers of the forward.
        now = [dict(one.buffers) for one in self._inside]
        apple = _apple_states()
        for state in self._apple:
            torch.mps.set_rng_state(state)
        if self._states is not None:
            states = other_states()
            set_other_states(self._states)
        for owner, key, tensor, copied in self._buffers:
            owner[key] = tensor.clone() if copied else tensor
        try:
            return self._forward(*args, **kwargs)
        finally:
            if self._states is not None:
                set_other_states(states)
            for state in apple:
                torch.mps.set_rng_state(state)
            for one, buffers in zip(self._inside, now, strict=True):
                one.buffers.clear()
                one.buffers.update(buffers)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, which may change in place only statistics of batches."""
        if others_seeded():
            self._states = other_states()
        self._apple = _apple_states()
        versions = []
        for name, buffers, module in self._inside:
            statistics = isinstance(module, _NormBase)
            for key, tensor in buffers.items():
                if tensor is None:
                    continue
                if statistics:
                    self._buffers.append((buffers, key, tensor.detach().clone(), True))
                else:
                    self._buffers.append((buffers, key, tensor, False))
                    versions.append((name, key, tensor, tensor._version))
        result = self._forward(*args, **kwargs)

        for name, key, tensor, version in versions:
            if tensor._version != version:
                raise Inexact(
                    "machine.recompute runs the forward of a block twice, but it changes the "
                    f"buffer {bare_name(f'{name}.{key}')} in place, so the second result may "
                    "differ; set machine.recompute none, set machine.blocks to smaller blocks "
                    "without it, or change the buffer outside of the block"
                )
        return result


def _recomputing(
    forward: Callable[..., Any], inside: Sequence[_Inside], contexts: Any, *, offload: bool
) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    if contexts and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
        # torch 2.15: hooks can count and offload kept tensors
        options["respect_saved_tensors_hooks"] = True

    @wraps(forward)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A compiled block restores its state by itself.
        call = forward if torch.compiler.is_compiling() else _Call(forward, inside)
        if not offload:
            return checkpoint(call, *args, use_reentrant=False, **options, **kwargs)

        # Keep the inputs on the device until the forward has used them.
        inputs = [_Offloaded(value) if torch.is_tensor(value) else value for value in args]
        result = checkpoint(_forward_on_device, call, inputs, use_reentrant=False, **kwargs)
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
        self._tensor: Tensor | None = tensor
        self._copy: Tensor | None = None
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad

    def on_device(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        assert self._copy is not None
        return self._copy.to(self._device, non_blocking=True).requires_grad_(self._requires_grad)

    def offload(self) -> None:
        assert self._tensor is not None
        pinned = self._device.type == "cuda"
        self._copy = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, pin_memory=pinned)
        # On the compute stream, so that the copy is ordered with the kernels that write this
        # memory.
        self._copy.copy_(self._tensor.detach(), non_blocking=pinned)
        self._tensor = None
