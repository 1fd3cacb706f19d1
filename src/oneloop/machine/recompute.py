"""Gradient checkpointing, from outside, for any model: activations are computed again instead of kept.

>>> recompute(model, "full")            # before accelerator.prepare; state-dict names stay as they are

What comes out is the same to the bit, dropout included: the random state of the first time is put back.
(Chen et al. 2016; selective: Korthikanti et al. 2022, as torch.utils.checkpoint does it.)
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from oneloop.machine.blocks import blocks

_ATTENTION = "flash_attention efficient_attention flash_attention_for_cpu cudnn_attention attention_math"
_KEPT = ["mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"]
_KEPT += [f"_scaled_dot_product_{kind}" for kind in (*_ATTENTION.split(), "fused_attention_overrideable")]
"""aten's products and attentions: few, and costly to compute again"""


def recompute(model: nn.Module, mode: str = "full", *, names: Sequence[str] = (), offload: bool = False) -> int:
    """Makes blocks of ``model`` recompute, in place.

    Args:
        model: not yet wrapped, sharded or compiled.
        mode: ``none``; ``full``: of each block only its input is kept; ``every:K``: so for each K-th block;
            ``selective``: the results of matrix products and attention are kept too, the rest is recomputed.
        names: class names of the blocks; see :func:`oneloop.machine.blocks.blocks`.
        offload: the inputs wait in pinned host memory; not for ``selective``.

    Returns:
        How many blocks recompute.

    Raises:
        ValueError: no such mode, no blocks, or nothing that could be offloaded.
    """
    kind, share = parsed(mode)
    if kind in ("none", "budget"):
        if offload:
            raise ValueError(f"offload requires recompute full or every:K, got {mode}, which keeps nothing by block")
        return 0
    layers = blocks(model, names)
    if not layers:
        none = f"{type(model).__name__} has no repeated blocks"
        raise ValueError(f"recompute {mode}: {none}; set machine.blocks, or machine.recompute none")
    if offload and kind == "selective":
        raise ValueError("offload does not work with recompute selective; use full or every:K")
    step = int(share) if kind == "every" else 1
    chosen = layers[step - 1 :: step]
    if not chosen:
        raise ValueError(f"recompute {mode}: {type(model).__name__} has only {len(layers)} blocks; choose a smaller K")
    contexts = partial(create_selective_checkpoint_contexts, _kept_operations()) if kind == "selective" else None
    for block in chosen:
        block.forward = _recomputing(block.forward, contexts, offload=offload)  # type: ignore[method-assign]
    return len(chosen)


def parsed(mode: str) -> tuple[str, float]:
    """("full", 0), ("every", K), ("budget", share) …

    Raises:
        ValueError: no such mode.
    """
    kind, colon, text = mode.partition(":")
    try:
        share = float(text) if colon else 0.0
    except ValueError:
        share = -1.0
    good = dict.fromkeys(("none", "full", "selective"), not colon)
    good |= {"every": bool(colon) and share >= 1 and share.is_integer(), "budget": bool(colon) and 0 <= share <= 1}
    if not good.get(kind, False):
        modes = "none, full, every:K (a whole number), selective, and budget:SHARE (0 to 1)"
        raise ValueError(f"recompute {mode!r} is unknown; known: {modes}")
    return kind, share


def _kept_operations() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if overload != "out"]


def _recomputing(forward: Callable[..., Any], contexts: Any, *, offload: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    if contexts and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
        options["respect_saved_tensors_hooks"] = True  # torch 2.15: so that what is kept can be counted, and offloaded

    @wraps(forward)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offload:
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        waiting = [_Waiting(value) if torch.is_tensor(value) else value for value in args]
        result = checkpoint(_with_inputs, forward, waiting, use_reentrant=False, **kwargs)
        for value in waiting:
            if isinstance(value, _Waiting):
                value.leave()
        return result

    return inner


def _with_inputs(forward: Callable[..., Any], waiting: list[Any], **kwargs: Any) -> Any:
    return forward(*(value.here() if isinstance(value, _Waiting) else value for value in waiting), **kwargs)


class _Waiting:
    """A block's input: itself in the forward, afterwards a copy in host memory, and for the backward again a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._copy: Tensor | None = None
        self._device, self._wants = tensor.device, tensor.requires_grad

    def here(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        assert self._copy is not None
        return self._copy.to(self._device, non_blocking=True).requires_grad_(self._wants)

    def leave(self) -> None:
        assert self._tensor is not None
        pinned = self._device.type == "cuda"
        self._copy = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, pin_memory=pinned)
        # On the computing stream: the copy is in order with what fills and what reuses this memory.
        self._copy.copy_(self._tensor.detach(), non_blocking=pinned)
        self._tensor = None
