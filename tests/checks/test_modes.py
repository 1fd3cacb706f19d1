"""Modes of a model in which its samples can be compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oneloop.basics.exit_codes import BadInput
from oneloop.checks.modes import without_draws

pytestmark = pytest.mark.covers("oneloop.checks.modes")


class Net(nn.Module):
    """A root module that may drop by a function, with BatchNorm or without it."""

    def __init__(self, *, norm: bool = False, drops: bool = False) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(3) if norm else nn.Identity(), nn.Linear(3, 3))
        self.drops = drops
        self.seen: list[tuple[bool, bool]] = []  # modes of the root and a layer, in the forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, self.layer.training))
        return F.dropout(self.layer(x), 0.5, self.drops and self.training)


def dry_run(model: Net, drew=lambda: False) -> SimpleNamespace:
    return SimpleNamespace(model=model, root=model, draws=False, drew=drew)


def tried(model: Net, *, loss_draws: bool = False, needs_training: bool = False):
    """Return the mode that is chosen, and what the loss saw of the model's mode in it."""
    outside: list[bool] = []

    seeded: list[torch.Tensor] = []

    def compute() -> bool:
        outside.append(model.training)
        seeded.append(torch.get_rng_state())
        model(torch.ones(2, 3)).sum().backward()
        if loss_draws and model.training:
            torch.rand(1)
        if needs_training and not model.layer.training:
            raise BadInput("the loss has no gradient in eval mode")
        return True

    def drew() -> bool:
        return not torch.equal(seeded[-1], torch.get_rng_state())

    modes = [module.training for module in model.modules()]
    dry = dry_run(model, drew)
    with without_draws(dry, compute) as (result, words):
        assert result is None or not drew()
    assert [module.training for module in model.modules()] == modes
    assert not model._forward_hooks and not model._forward_pre_hooks
    return words, outside[-1], model.seen[-1]


def test_a_model_that_draws_nothing_keeps_its_mode():
    assert tried(Net()) == ("in training", True, (True, True))


@pytest.mark.parametrize("model", [Net(norm=True), Net(drops=True)], ids=["norm", "drops"])
def test_the_loss_sees_a_model_in_training_mode(model):
    words, outside, inside = tried(model)
    assert words == "with dropout and BatchNorm in eval mode"
    assert outside and inside == (False, False)


def test_a_loss_that_draws_in_training_is_compared_in_eval_mode():
    assert tried(Net(), loss_draws=True) == ("in eval mode", False, (False, False))


def test_a_loss_that_needs_training_mode_is_not_compared():
    assert tried(Net(drops=True), needs_training=True)[0] == ""
    model = Net()
    with pytest.raises(BadInput), without_draws(dry_run(model), _fails):
        pass


def test_a_known_result_is_not_computed_again():
    known = object()
    model = Net()
    with without_draws(dry_run(model), _fails, known) as (result, words):
        assert result is known and words == "in training"


def _fails() -> None:
    raise BadInput("computed")
