"""Optimizers of a model: parameter groups, weight decay, learning rates."""

from __future__ import annotations

import pytest
import torch

from oneloop.optim.optimizers import adamw, build, set_lr, sgd
from tiny import three_layers


def test_no_weight_decay_on_vectors():
    optimizer = build(adamw, three_layers(), lr=0.1, weight_decay=0.3)
    assert [
        (group["weight_decay"], {p.ndim for p in group["params"]})
        for group in optimizer.param_groups
    ] == [
        (0.3, {2}),
        (0.0, {1}),
    ]
    assert len(build(adamw, three_layers(), lr=0.1, weight_decay=0.0).param_groups) == 1
    with pytest.raises(ValueError, match="Rprop has no weight decay"):
        build(torch.optim.Rprop, three_layers(), lr=0.1, weight_decay=0.3)


def test_set_lr_reaches_every_group():
    optimizer = build(sgd, three_layers(), lr=0.1, weight_decay=0.1)
    set_lr(optimizer, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]


def test_the_learning_rate_follows_the_batch():
    from oneloop.job.build import peak
    from oneloop.recipe.training_keys import OptimizerConfig

    def rate(rule: str, at: int = 64) -> float:
        return peak(OptimizerConfig(lr=0.1, lr_at_batch=at, lr_rule=rule), 256)

    assert [rate("linear"), rate("sqrt"), rate("none"), rate("linear", 0)] == pytest.approx(
        [0.4, 0.2, 0.1, 0.1]
    )
