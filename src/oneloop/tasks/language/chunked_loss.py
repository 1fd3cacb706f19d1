"""Output layer and cross-entropy in chunks of tokens, which never hold all logits in memory.

>>> losses = chunked_cross_entropy(hidden, head.weight, target)
>>> losses.total.backward()                          # also: losses.each, losses.right
>>> without_logits(model)                            # of transformers, not yet wrapped
>>> losses = model(input_ids=tokens, target=target)  # without target=, logits as before
>>> losses = model(input_ids=tokens, target=target, apart=True)  # losses.each is differentiable

The forward also computes the gradients, while the logits of a chunk exist (as in Liger, Hsu et al.
2024). With ``apart`` the factor of each loss is known only in the backward, because it depends on
the losses of other tokens (the log-probability of a whole answer). So the backward computes the
logits of each chunk again: one matrix product more.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from oneloop.basics.tensors import on_gpu
from oneloop.basics.wide_sums import widest
from oneloop.tasks.probe import probe

Change = Callable[[Tensor], Tensor]  # what a model applies to the logits of its output layer

# Logits of a chunk: many on a GPU, few in the caches of a CPU. On a GPU, the loss holds up to 16
# bytes per logit, thus 2 GiB. If it is compiled, and the model does not change its logits, it holds
# up to three tensors in the dtype of the products.
_ON_GPU = 1 << 27
_BYTES = 16
_COMPILED = 3
_ON_CPU = 1 << 24
_TILE = 256  # tokens; matrix products of a GPU waste part of a tile if the rest is smaller

# Names in configs of transformers of what a model does to its logits: a cap, or a factor and its
# exponent.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_MULTIPLIED = {"hyperclovax"}  # model types whose logits_scaling is a factor


class Losses(NamedTuple):
    """Losses of the targets; ignored targets have 0 and False.

    Attributes:
        total: sum of the losses; differentiable, except with ``apart``.
        each: loss of each target; differentiable only with ``apart``.
        right: whether the target has the largest logit; None if it was not wanted.
    """

    total: Tensor
    each: Tensor
    right: Tensor | None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    change: Change | None = None,
    entries: int | None = None,
    right: bool = True,
    apart: bool = False,
) -> Losses:
    """Return the cross-entropy of ``change(hidden @ weight.T + bias)``.

    Matrix products use the autocast dtype; the loss of half-precision logits is computed in
    float32.

    Args:
        hidden: hidden states, shape (tokens, width), or with more dimensions before the width.
        weight: weight of the output layer, shape (vocabulary, width).
        target: int64, shape (tokens,) or any other that ``hidden`` has before its width; -100 is
            ignored.
        bias: bias of the output layer, shape (vocabulary,).
        change: what the model applies to the logits; it must act on each logit or each row
            separately.
        entries: maximum number of logits in memory; None: 2^24 on a CPU; on a GPU, which reads and
            writes the weight's gradient for each chunk, 2^27, and 2^29 if it is compiled.
        right: whether to find out which targets have the largest logit.
        apart: make the loss of each target differentiable, and not the sum.

    Raises:
        ValueError: the products are in float16, in which small gradients of the logits underflow.
    """
    if product_dtype(hidden) is torch.float16:
        raise ValueError(
            "the loss without logits does not work in fp16: small gradients of the logits "
            "underflow in fp16; use bf16, or task.fused_loss false"
        )
    rows = hidden.flatten(0, -2)
    total, each, largest = _Chunked.apply(
        rows,
        weight,
        bias,
        target.flatten(),
        change,
        tokens_of_a_chunk(rows, len(weight), entries, change),
        right,
        # Grad mode is off inside of forward, so read it here.
        torch.is_grad_enabled() and not apart,
    )
    return Losses(total, each.view_as(target), largest.view_as(target) if right else None)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        change: Change | None,
        size: int,
        wants_right: bool,
        with_slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.with_slopes = with_slopes
        ctx.how = (change, size, product_dtype(hidden))
        inputs = (hidden, weight, bias, target)
        needs = [with_slopes and need for need in ctx.needs_input_grad[:3]]
        each, right, slopes = _in_chunks(*inputs, *ctx.how, needs=needs, wants_right=wants_right)
        total = each.sum()
        ctx.mark_non_differentiable(each if with_slopes else total, right)
        ctx.save_for_backward(*(slopes if with_slopes else inputs))
        return total, each, right

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor, factors: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Scale in place, because a copy of the weight's gradient is large.

        torch rejects a second backward.
        """
        if ctx.with_slopes:
            slopes = list(ctx.saved_tensors)
            for saved in slopes:
                if saved is not None:
                    saved.mul_(slope)
        else:
            needs = ctx.needs_input_grad[:3]
            _, _, slopes = _in_chunks(*ctx.saved_tensors, *ctx.how, needs=needs, factors=factors)
        # The other five arguments of forward have no gradient.
        return (*slopes, None, None, None, None, None)


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    change: Change | None,
    size: int,
    dtype: torch.dtype,
    *,
    needs: Sequence[bool],
    wants_right: bool = False,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the losses, which targets have the largest logit, and the gradients of three tensors.

    Args:
        hidden: see :func:`chunked_cross_entropy`, as the other tensors.
        weight: of the output layer.
        bias: of the output layer.
        target: the targets.
        change: what the model applies to the logits.
        size: number of tokens of a chunk.
        dtype: dtype of the matrix products.
        needs: whether the gradients of ``hidden``, ``weight`` and ``bias`` are needed.
        wants_right: whether to find the largest logits.
        factors: factor of each token's gradient; None: 1.
    """
    # Allocate the results, and the gradients that are needed, which are summed in float32 at least.
    exact = torch.promote_types(dtype, torch.float32)
    device = hidden.device
    each = torch.empty(target.shape, dtype=exact, device=device)
    right = torch.empty(target.shape if wants_right else (0,), dtype=torch.bool, device=device)
    hidden_slopes = torch.empty_like(hidden) if needs[0] else None
    weight_slopes = torch.zeros_like(weight, dtype=exact) if needs[1] else None
    bias_slopes = None
    if bias is not None and needs[2]:
        bias_slopes = torch.zeros_like(bias, dtype=exact)

    # Cast the layer once for all chunks. Below, every cast is explicit, and autocast is off.
    layer_weight = weight.detach().to(dtype)
    layer_bias = None if bias is None else bias.detach().to(dtype)

    # Compute the loss of one chunk of tokens after the other.
    done: list[Tensor] = []  # results of the chunk before
    autocast_off: AbstractContextManager[object] = nullcontext()
    if _is_autocast(hidden):
        autocast_off = torch.autocast(device.type, enabled=False)
    with autocast_off:
        # torch.compile guards on this count, not on the tokens.
        for number in range(-(-len(hidden) // size)):
            part = slice(number * size, (number + 1) * size)
            states = hidden[part].detach().to(dtype)
            if done and torch.compiler.is_compiling():
                states = after(states, done)
            targets = target[part]
            logits = F.linear(states, layer_weight, layer_bias)
            losses, largest, slopes = losses_of_a_chunk(
                logits, targets, change, slopes=any(needs), largest=wants_right
            )
            each[part] = losses
            done = [losses]
            if largest is not None:
                right[part] = largest == targets
                done.append(largest)
            del logits  # before the products below allocate memory

            # Run the output layer's backward, while the gradient of these logits exists.
            if slopes is None:
                continue
            if factors is not None:
                slopes = (slopes * factors[part, None]).to(dtype)
            if hidden_slopes is not None:
                product = slopes @ layer_weight
                hidden_slopes[part] = product
                done.append(product)
            if weight_slopes is not None:
                if slopes.dtype == exact:
                    weight_slopes.addmm_(slopes.T, states)
                else:
                    # The product is in half precision, the sum over the chunks in float32.
                    weight_slopes += slopes.T @ states
                done.append(weight_slopes)
            if bias_slopes is not None:
                bias_slopes += slopes.sum(0, dtype=exact)
                done.append(bias_slopes)

    # Round the sums over all chunks once, to the dtypes of the parameters.
    if weight_slopes is not None:
        weight_slopes = weight_slopes.to(weight.dtype)
    if bias is not None and bias_slopes is not None:
        bias_slopes = bias_slopes.to(bias.dtype)
    return each, right, [hidden_slopes, weight_slopes, bias_slopes]


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
        return F.cross_entropy(logits, target, reduction="none"), found

    # ``change`` is any function: let autograd differentiate it, while these logits exist.
    slope: Tensor | None = None
    if slopes:
        each, backward, found = torch.func.vjp(losses, logits, has_aux=True)  # type: ignore[misc]
        (slope,) = backward(torch.ones_like(each))
    else:
        each, found = losses(logits)
    return each, found if largest else None, slope


def without_logits(model: nn.Module) -> None:
    """Make ``model`` accept ``target`` and then return :class:`Losses`, in place.

    With ``apart`` each loss is differentiable, for which the backward computes logits again.

    Scaling and soft-capping of logits are read from the config, and tested on eight tokens unless
    the model is on meta.

    Args:
        model: a model with transformers' ``base_model`` and ``get_output_embeddings``; its new
            argument ``target`` has the shape of its tokens. While gradients are computed, the
            result has no ``right``.

    Raises:
        ValueError: the model has no linear output layer, or computes its logits in an unknown way.
    """
    name = type(model).__name__
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise ValueError(
            f"a loss without logits needs a linear output layer, and {name} has {kind}"
        )
    if getattr(model, "base_model", model) is model:
        raise ValueError(f"a loss without logits needs a base_model, and {name} has none")

    # Read what happens to the logits, and test it, which is impossible on meta.
    change = _change(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        _test_run(model, head, change)

    # Replace the forward of the output layer, too: FSDP2 gathers its weights when it is called.
    head_forward = head.forward
    model_forward = model.forward

    def chunked_head(
        hidden: Tensor, target: Tensor | None = None, *, apart: bool = False
    ) -> Tensor | Losses:
        if target is None:
            return head_forward(hidden)
        return chunked_cross_entropy(
            hidden,
            head.weight,
            target,
            bias=head.bias,
            change=change,
            right=not torch.is_grad_enabled(),  # training uses only the loss
            apart=apart,
        )

    @wraps(model_forward)
    def losses(*args: Any, target: Tensor | None = None, apart: bool = False, **kwargs: Any) -> Any:
        if target is None:
            return model_forward(*args, **kwargs)
        output = model.base_model(*args, **kwargs)  # type: ignore[operator]
        return head(output.last_hidden_state, target, apart=apart)

    head.forward = chunked_head  # type: ignore[method-assign,assignment]
    model.forward = losses  # type: ignore[method-assign]


def _change(model: nn.Module) -> Change | None:
    """Return what ``model`` applies to its logits according to its config; None: nothing."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()

    # Multiply all factors; some models divide by the value of the same key.
    factor = 1.0
    for name, exponent in _FACTORS.items():
        if getattr(config, "model_type", None) in _MULTIPLIED:
            exponent = 1
        factor *= (getattr(config, name, None) or 1.0) ** exponent

    # A cap follows after the factors.
    cap = next(filter(None, (getattr(config, name, None) for name in _CAPS)), None)
    if cap is not None:
        return lambda logits: torch.tanh(logits * (factor / cap)) * cap
    if factor == 1.0:
        return None
    return lambda logits: logits * factor


@torch.no_grad()
def _test_run(model: nn.Module, head: nn.Linear, change: Change | None) -> None:
    """Raise ValueError if the model's logits are not ``change`` of its output layer's.

    In place of the output layer's logits, the model gets a ramp of ±50, so that soft-capping is
    noticed. The output layer must get what the base model returns.
    """
    name = type(model).__name__
    forward = head.forward
    weight = head.weight
    tokens = torch.arange(min(8, len(weight)), device=weight.device)[None]
    ramp = torch.linspace(-50, 50, len(weight), device=weight.device, dtype=weight.dtype)
    expected = [ramp if change is None else change(ramp)]
    found = list[Tensor]()

    def ramped(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return ramp.expand(*hidden.shape[:-1], -1)

    # Run the base model, and the model with the ramp.
    try:
        expected.append(probe(model.base_model, tokens, use_cache=False).last_hidden_state)
        head.forward = ramped  # type: ignore[method-assign,assignment]
        found.insert(0, probe(model, tokens, use_cache=False).logits)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{name} cannot run eight tokens to try the loss without logits: {why}"
        ) from error
    finally:
        head.forward = forward  # type: ignore[method-assign]

    # The two ways may round differently, in the dtype of the weights. If the model does not call
    # its output layer, its logits are not the ramp.
    bound = 1e-4 if torch.finfo(weight.dtype).bits >= 32 else 2e-2
    for own, other in zip(found, expected, strict=False):
        worst = float("inf")
        if own.shape[-1] == other.shape[-1]:
            difference = widest(own) - widest(other)
            worst = float(difference.abs().max() / other.abs().max())
        if not worst <= bound:  # also for NaN
            raise ValueError(
                f"a loss without logits: the logits of {name} differ from its output layer's by "
                f"{worst:.1e} of the largest (at most {bound:.0e})"
            )
