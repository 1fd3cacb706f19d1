"""The arithmetic of :mod:`oneloop.tasks.language.chunked_loss` on one chunk of tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from oneloop.basics.tensors import on_gpu

Change = Callable[[Tensor], Tensor]  # what a model applies to the logits of its output layer

# Logits of a chunk: many on a GPU, few in the caches of a CPU. On a GPU, the loss holds up to 16
# bytes per logit, thus 2 GiB. If it is compiled, and the model does not change its logits, it holds
# up to three tensors in the dtype of the products.
_ON_GPU = 1 << 27
_BYTES = 16
_COMPILED = 3
_ON_CPU = 1 << 24
_TILE = 256  # tokens; matrix products of a GPU waste part of a tile if the rest is smaller


def tokens_of_a_chunk(
    hidden: Tensor, vocabulary: int, entries: int | None, change: Change | None = None
) -> int:
    """Return the number of tokens of a chunk."""
    if entries is not None:
        return max(1, entries // vocabulary)
    if not on_gpu(hidden):
        return max(1, _ON_CPU // vocabulary)
    entries = _ON_GPU
    if torch.compiler.is_compiling() and change is None:
        entries = _ON_GPU * _BYTES // (_COMPILED * product_dtype(hidden).itemsize)
    rows = entries // vocabulary
    return max(1, rows - rows % _TILE if rows > _TILE else rows)


@torch.library.custom_op("oneloop::after", mutates_args=())
def after(states: Tensor, done: list[Tensor]) -> Tensor:
    """Return a copy of ``states`` that torch.compile makes only after it has computed ``done``.

    Without it, a compiled loss computes the logits of all chunks before the first loss.
    """
    return states.clone()


@after.register_fake
def _(states: Tensor, done: list[Tensor]) -> Tensor:
    return torch.empty_like(states)


def without_autocast(hidden: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off in this context, if it is on."""
    if not _is_autocast(hidden):
        return nullcontext()
    return torch.autocast(hidden.device.type, enabled=False)


def _is_autocast(hidden: Tensor) -> bool:
    device = hidden.device.type
    available = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products."""
    if _is_autocast(hidden):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def losses_of_a_chunk(
    logits: Tensor,
    target: Tensor,
    ignore: int,
    change: Change | None,
    *,
    slopes: bool,
    largest: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss of each target, the entry with its largest logit, and the gradient of
    ``logits``.

    Args:
        logits: logits of the output layer, before ``change``, shape (tokens, vocabulary).
        target: int64, shape (tokens,).
        ignore: value of ignored targets.
        change: what the model applies to the logits.
        slopes: whether the gradient is needed; without it the last result is None.
        largest: whether the entries are needed; without them the second result is None.
    """

    def losses(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if change is not None:
            logits = change(logits)
        # A pass over all logits, which training does not need.
        found = logits.argmax(-1) if largest else target
        return F.cross_entropy(logits, target, reduction="none", ignore_index=ignore), found

    # ``change`` is any function: let autograd differentiate it, while these logits exist.
    slope: Tensor | None = None
    if slopes:
        each, backward, found = torch.func.vjp(losses, logits, has_aux=True)  # type: ignore[misc]
        (slope,) = backward(torch.ones_like(each))
    else:
        each, found = losses(logits)
    return each, found if largest else None, slope


def add_product(total: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add the gradient of the output layer's weight, in place."""
    if total.dtype == slopes.dtype:
        total.addmm_(slopes.T, states)
    else:
        # The product is in half precision, the sum over the chunks in float32.
        total += slopes.T @ states
