"""The differentiable loss of each token equals F.cross_entropy on all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from logit_cases import ONE, RAGGED, SINGLE, capped, off, tensors, tiny
from oneloop.tasks.language.chunked_loss import chunked_cross_entropy, without_logits

pytestmark = [
    pytest.mark.covers("oneloop.tasks.language.chunked_loss"),
    pytest.mark.usefixtures("one_thread"),
]


def token_losses(*inputs, **options):
    """Return the differentiable loss of each token."""
    losses = chunked_cross_entropy(*inputs, apart=True, **options)
    assert not losses.total.requires_grad
    return losses.each


def of_pairs(each: torch.Tensor) -> torch.Tensor:
    """A function in which the factor of each token depends on the others, as in DPO."""
    sums = each[:36].view(4, 9).sum(1)
    return F.softplus(0.3 * (sums[::2] - sums[1::2])).sum()


@pytest.mark.parametrize("entries", [ONE, RAGGED, SINGLE])
@pytest.mark.parametrize("change", [None, capped])
@pytest.mark.parametrize("with_bias", [True, False])
def test_losses_and_gradients_are_those_of_all_logits(entries, change, with_bias):
    inputs, target = tensors()
    inputs = inputs if with_bias else inputs[:2]
    bias = inputs[2] if with_bias else None
    logits = F.linear(inputs[0], inputs[1], bias)
    logits = logits if change is None else change(logits)
    expected = F.cross_entropy(logits, target, reduction="none")
    found = token_losses(*inputs[:2], target, bias=bias, change=change, entries=entries)
    assert off(found, expected) <= 1e-12
    for mine, theirs in zip(
        torch.autograd.grad(of_pairs(found), inputs),
        torch.autograd.grad(of_pairs(expected), inputs),
        strict=True,
    ):
        assert off(mine, theirs) <= 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    inputs, target = tensors(torch.float32 if autocast else torch.bfloat16)
    (exact, exact_weight, _), _ = tensors()
    expected = F.cross_entropy(F.linear(exact, exact_weight), target, reduction="none")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = token_losses(*inputs[:2], target, entries=RAGGED)
        slopes = torch.autograd.grad(of_pairs(found), inputs[:2])
    assert found.dtype == torch.float32 and off(found, expected) < 0.02
    for mine, theirs in zip(
        slopes, torch.autograd.grad(of_pairs(expected), [exact, exact_weight]), strict=True
    ):
        assert off(mine, theirs) < 0.05
    with pytest.raises(ValueError, match="does not work in fp16"):
        token_losses(*(one.half() for one in inputs[:2]), target)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma2"])
def test_a_model_gives_what_its_own_logits_give(name):
    model = tiny(name).double()
    tokens = torch.randint(0, 90, (3, 12))
    target = torch.roll(tokens, -1, 1)
    target[:, -1] = -100
    logits = model(input_ids=tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    of_pairs(expected).backward()
    slopes = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    without_logits(model)
    found = model(input_ids=tokens, target=target, apart=True).each
    assert found.shape == target.shape and off(found.flatten(), expected) <= 1e-12
    of_pairs(found.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert off(parameter.grad, slopes[name]) <= 1e-10, name
    with torch.no_grad():
        evaluated = model(input_ids=tokens, target=target, apart=True)
    assert off(evaluated.each.flatten(), expected) <= 1e-12 and evaluated.right is not None
