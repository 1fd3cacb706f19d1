"""The loss of each token, differentiable, in chunks of tokens that never hold all logits in memory.

:mod:`oneloop.tasks.language.chunked_loss` knows the gradient of a sum in its forward. Here the
factor of each token is known only in the backward, as it depends on the losses of other tokens (the
log-probability of a whole answer). So the backward computes the logits of each chunk again: one
matrix product more.

>>> losses = token_losses(hidden, head.weight, target)   # (tokens,)
>>> f(losses).backward()
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from oneloop.tasks.language.logit_chunks import (
    Change,
    add_product,
    gradients_for,
    in_dtype,
    in_dtype_of,
    losses_of_a_chunk,
    product_dtype,
    tokens_of_a_chunk,
    without_autocast,
)


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    change: Change | None = None,
    entries: int | None = None,
) -> Tensor:
    """Return the cross-entropy of each token, (tokens,); 0 for ignored targets.

    Args:
        hidden: hidden states, shape (tokens, width).
        weight: weight of the output layer, shape (vocabulary, width).
        target: int64, shape (tokens,).
        bias: bias of the output layer, shape (vocabulary,).
        ignore: value of ignored targets.
        change: what the model applies to the logits, as in
            :func:`oneloop.tasks.language.chunked_loss.chunked_cross_entropy`.
        entries: maximum number of logits in memory; None: chosen by the device.

    Raises:
        ValueError: the products are in float16, in which small gradients of the logits underflow.
    """
    dtype = product_dtype(hidden)
    if dtype is torch.float16:
        raise ValueError(
            "the losses of tokens without logits do not work in fp16: small gradients of the "
            "logits underflow in fp16; use bf16, or task.fused_loss false"
        )
    size = tokens_of_a_chunk(hidden, len(weight), entries, change)
    each: Tensor = _Each.apply(hidden, weight, bias, target, ignore, change, size, dtype)
    return each


class _Each(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore: int,
        change: Change | None,
        size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.how = (ignore, change, size, dtype)
        exact = torch.promote_types(dtype, torch.float32)
        each = torch.empty(target.shape, dtype=exact, device=hidden.device)
        layer_weight, layer_bias = in_dtype(weight, bias, dtype)
        with without_autocast(hidden):
            for start in range(0, len(hidden), size):
                part = slice(start, start + size)
                states = hidden[part].detach().to(dtype)
                logits = F.linear(states, layer_weight, layer_bias)
                each[part], _, _ = losses_of_a_chunk(
                    logits, target[part], ignore, change, slopes=False, largest=False
                )
        return each

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the logits again, and scale the gradient of each token by its factor."""
        hidden, weight, bias, target = ctx.saved_tensors
        ignore, change, size, dtype = ctx.how
        exact = torch.promote_types(dtype, torch.float32)
        hidden_slopes, weight_slopes, bias_slopes = gradients_for(
            hidden, weight, bias, ctx.needs_input_grad[:3], exact
        )
        layer_weight, layer_bias = in_dtype(weight, bias, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                part = slice(start, start + size)
                states = hidden[part].detach().to(dtype)
                logits = F.linear(states, layer_weight, layer_bias)
                _, _, slopes = losses_of_a_chunk(
                    logits, target[part], ignore, change, slopes=True, largest=False
                )
                assert slopes is not None
                slopes = (slopes * factors[part, None]).to(dtype)
                del logits  # before the products below allocate memory
                if hidden_slopes is not None:
                    hidden_slopes[part] = slopes @ layer_weight
                if weight_slopes is not None:
                    add_product(weight_slopes, slopes, states)
                if bias_slopes is not None:
                    bias_slopes += slopes.sum(0, dtype=exact)

        # The other five arguments of forward have no gradient.
        return (
            hidden_slopes,
            in_dtype_of(weight, weight_slopes),
            in_dtype_of(bias, bias_slopes),
            None,
            None,
            None,
            None,
            None,
        )
