"""Output layer and cross-entropy in chunks of tokens, so that the logits of all tokens are never in
memory.

>>> losses = chunked_cross_entropy(hidden, head.weight, target)
>>> losses.total.backward()                          # also: losses.each, losses.right
>>> without_logits(model)                            # of transformers, not yet wrapped
>>> losses = model(input_ids=tokens, target=target)  # without target=, logits as before

The forward also computes the gradients, while the logits of a chunk exist (as in Liger, Hsu et al.
2024).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Change = Callable[[Tensor], Tensor]  # what a model applies to the logits of its output layer

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_MULTIPLIED = {"hyperclovax"}  # model types whose logits_scaling is a factor


class Losses(NamedTuple):
    """Losses of the targets; ignored targets have 0 and False.

    Attributes:
        total: sum of the losses; differentiable.
        each: loss of each target; detached.
        right: whether the target has the largest logit."""

    total: Tensor
    each: Tensor
    right: Tensor


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    change: Change | None = None,
    entries: int = 1 << 24,
) -> Losses:
    """Return the summed cross-entropy of ``change(hidden @ weight.T + bias)``.

    Matrix products use the autocast dtype; the loss of half-precision logits is computed in
    float32.

    Args: ``hidden``: (tokens, width). ``weight``: (vocabulary, width). ``target``: (tokens,),
    int64. ``bias``: (vocabulary,). ``ignore``: value of ignored targets. ``change``: what the model
    applies to the logits; it must act on each logit or each row separately. ``entries``: maximum
    number of logits in memory.

    Raises ValueError: the products are in float16, in which small gradients of the logits
    underflow.
    """
    if _product_dtype(hidden) is torch.float16:
        why = "small gradients of the logits underflow in fp16"
        raise ValueError(
            f"the loss without logits does not work in fp16: {why}; use bf16, or "
            "task.fused_loss false"
        )
    return Losses(
        *_Chunked.apply(
            hidden, weight, bias, target, ignore, change, entries, torch.is_grad_enabled()
        )
    )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore: int,
        change: Change | None,
        entries: int,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = [differentiable and need for need in ctx.needs_input_grad[:3]]
        device, dtype = hidden.device.type, _product_dtype(hidden)
        exact = torch.promote_types(dtype, torch.float32)
        layer = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        each = torch.empty(target.shape, dtype=exact, device=hidden.device)
        right = torch.empty(target.shape, dtype=torch.bool, device=hidden.device)
        sums: list[Tensor | None] = [torch.empty_like(hidden) if needs[0] else None]
        parameters = [(weight, needs[1]), (bias, needs[2])]
        sums += [
            torch.zeros_like(x, dtype=exact) if need and x is not None else None
            for x, need in parameters
        ]
        size = max(1, entries // len(weight))
        with torch.autocast(device, enabled=False) if _autocast(hidden) else nullcontext():
            # torch.compile guards on this count, not on the tokens
            for number in range(-(-len(hidden) // size)):
                part = slice(number * size, (number + 1) * size)
                states, targets = hidden[part].detach().to(dtype), target[part]
                logits = F.linear(states, *layer)
                each[part], right[part], slopes = _chunk(
                    logits, targets, ignore, change, any(needs)
                )
                del logits
                if slopes is not None:
                    _add(sums, part, states, layer[0], slopes)
        ctx.mark_non_differentiable(each, right)
        dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(
            *(None if x is None else x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True))
        )
        return each.sum(), each, right

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale in place, because a copy of the weight's gradient is large; torch rejects a second
        backward."""
        return *(None if saved is None else saved.mul_(slope) for saved in ctx.saved_tensors), *[
            None
        ] * 5


def _autocast(hidden: Tensor) -> bool:
    device = hidden.device.type
    available = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products."""
    return torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype


def _chunk(
    logits: Tensor, target: Tensor, ignore: int, change: Change | None, slopes: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss of each target, whether it is right, and the gradient of the output layer's
    logits."""

    def losses(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if change is None else change(logits)
        largest = logits.argmax(-1)
        return F.cross_entropy(logits, target, reduction="none", ignore_index=ignore), largest

    if slopes:
        each, backward, largest = torch.func.vjp(losses, logits, has_aux=True)  # type: ignore[misc]
        (slope,) = backward(torch.ones_like(each))
    else:
        (each, largest), slope = losses(logits), None
    return each, (largest == target) & (target != ignore), slope


def _add(
    sums: list[Tensor | None], part: slice, states: Tensor, weight: Tensor, slopes: Tensor
) -> None:
    """Run the output layer's backward: write gradients of the hidden states; add those of weight
    and bias."""
    if sums[0] is not None:
        sums[0][part] = slopes @ weight
    if sums[1] is not None:
        if sums[1].dtype == slopes.dtype:
            sums[1].addmm_(slopes.T, states)
        else:
            sums[1] += slopes.T @ states
    if sums[2] is not None:
        sums[2] += slopes.sum(0, dtype=sums[2].dtype)


def without_logits(model: nn.Module, *, ignore: int = -100) -> None:
    """Make ``model`` accept ``target``, of the shape of its tokens, and return :class:`Losses`; in
    place.

    Scaling and soft-capping of logits are read from the config, and tested on eight tokens unless
    the model is on meta.

    Args: ``model``: a model with transformers' ``base_model`` and ``get_output_embeddings``.
    ``ignore``: value of ignored targets.

    Raises ValueError: the model has no linear output layer, or computes its logits in an unknown
    way.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise ValueError(
            f"a loss without logits needs a linear output layer, and {type(model).__name__} "
            f"has {kind}"
        )
    if getattr(model, "base_model", model) is model:
        raise ValueError(
            f"a loss without logits needs a base_model, and {type(model).__name__} has none"
        )
    change = _change(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        _test_run(model, head, change)
    logits, forward = head.forward, model.forward

    def chunked_head(hidden: Tensor, target: Tensor | None = None) -> Tensor | Losses:
        """Replace the layer's forward, so that FSDP2 gathers its weights."""
        if target is None:
            return logits(hidden)
        found = chunked_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            target.flatten(),
            bias=head.bias,
            ignore=ignore,
            change=change,
        )
        return Losses(found.total, found.each.view_as(target), found.right.view_as(target))

    @wraps(forward)
    def losses(*args: Any, target: Tensor | None = None, **kwargs: Any) -> Any:
        if target is None:
            return forward(*args, **kwargs)
        return head(model.base_model(*args, **kwargs).last_hidden_state, target)  # type: ignore[operator]

    head.forward, model.forward = chunked_head, losses  # type: ignore[method-assign,assignment]


def _change(model: nn.Module) -> Change | None:
    """Return what ``model`` applies to its logits according to its config; None: nothing."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def values_of(names: tuple[str, ...]) -> list[float]:
        return [
            float(value)
            for name in names
            if isinstance(value := getattr(config, name, None), int | float)
        ]

    factor = 1.0
    for value in values_of(_FACTORS):
        factor *= value
    for value in values_of(_DIVISORS):
        factor = (
            factor * value if getattr(config, "model_type", None) in _MULTIPLIED else factor / value
        )
    caps = values_of(_CAPS)
    if not caps:
        return None if factor == 1.0 else lambda logits: logits * factor
    cap = caps[0]
    return lambda logits: torch.tanh(logits * (factor / cap)) * cap


@torch.no_grad()
def _test_run(model: nn.Module, head: nn.Linear, change: Change | None) -> None:
    """Compare with the model's logits; a ramp of ±50 is added to them, so that soft-capping is
    noticed."""
    name, forward = type(model).__name__, head.forward
    entries, device = head.out_features, head.weight.device
    tokens = torch.arange(min(8, entries), device=device)[None]
    ramp = torch.linspace(-50, 50, entries, device=device, dtype=head.weight.dtype)

    def ramped(hidden: Tensor) -> Tensor:
        return forward(hidden) * boost + ramp

    with _eval_mode(model):
        try:
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[operator]
            largest = forward(hidden).abs().max()
            boost = torch.where(largest > 0, 50 / largest, 0.0).to(head.weight.dtype)
            head.forward = ramped  # type: ignore[method-assign,assignment]
            own = model(input_ids=tokens, use_cache=False).logits.double()
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"{name} cannot run eight tokens to try the loss without logits: {why}"
            ) from error
        finally:
            head.forward = forward  # type: ignore[method-assign]
    logits = ramped(hidden).double()
    logits = logits if change is None else change(logits)
    bound = 1e-4 if torch.finfo(head.weight.dtype).bits >= 32 else 2e-2
    worst = (
        float((own - logits).abs().max() / own.abs().max())
        if own.shape == logits.shape
        else float("inf")
    )
    if not worst <= bound:
        apart = f"by {worst:.1e} of the largest (at most {bound:.0e})"
        raise ValueError(
            f"a loss without logits: the logits of {name} differ from its output layer's {apart}"
        )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
