"""The output layer and its cross-entropy in one, piece by piece, without the logits of all tokens in memory.

>>> fuse_loss(model)                             # a transformers causal language model, not yet wrapped
>>> loss = model(input_ids=tokens, target=target)    # the sum over the targets; without target=, logits as before

Liger's kernel on a GPU where `liger-kernel` is installed (Hsu et al. 2024), else torch's own (torch 2.15 or newer).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_AFTERWARDS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""what transformers' configs say of models that change their logits after the output layer"""


def fuse_loss(model: nn.Module, *, ignore: int = -100) -> str:
    """Lets ``model`` take ``target``, of the shape of its tokens, and return the summed loss; in place.

    Args:
        model: with transformers' ``base_model`` and ``get_output_embeddings``.
        ignore: value of targets that do not count.

    Returns:
        Whose kernel it is: liger or torch.

    Raises:
        ValueError: no such kernel here; or the model has no output layer of its own, or changes its logits after it.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"a fused loss needs a linear output layer, and {type(model).__name__} has none")
    changes = [
        name for name in _AFTERWARDS if getattr(getattr(model, "config", None), name, None) not in (None, 1, 1.0)
    ]
    if changes:
        raise ValueError(
            f"a fused loss takes the output layer's logits as they are, and {type(model).__name__} changes them"
            f" ({', '.join(changes)}); leave it out"
        )
    whose, summed = _kernel(ignore)
    logits, forward = head.forward, model.forward

    def fused_head(hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Called through the layer itself, so that FSDP2 gathers its weights."""
        if target is None:
            return logits(hidden)
        return summed(hidden.flatten(0, -2), head.weight, target.flatten(), head.bias)

    @wraps(forward)
    def fused(*args: Any, target: Tensor | None = None, **kwargs: Any) -> Any:
        if target is None:
            return forward(*args, **kwargs)
        return head(model.base_model(*args, **kwargs).last_hidden_state, target)  # type: ignore[operator]

    head.forward, model.forward = fused_head, fused  # type: ignore[method-assign,assignment]
    return whose


def _kernel(ignore: int) -> tuple[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]]:
    if torch.cuda.is_available() and find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore, reduction="sum")
        return "liger", lambda hidden, weight, target, bias: liger(weight, hidden, target, bias)
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ValueError(
            "a fused loss needs liger-kernel and a GPU, or torch 2.15; pip install liger-kernel, or leave it out"
        )
    options = torch.nn.LinearCrossEntropyOptions()
    return "torch", lambda hidden, weight, target, bias: F.linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, ignore_index=ignore, reduction="sum", options=options
    )
