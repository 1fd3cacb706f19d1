"""Promise 3: the same weights on any parallel layout as in a plain PyTorch loop."""

from __future__ import annotations

import pytest
import torch

from oneloop.data.order import Order
from splits import BATCH, distance, expected, furthest, trained

pytestmark = pytest.mark.covers(
    "oneloop.loop.gradients",
    "oneloop.loop.steps",
    "oneloop.train",
)

# (ranks, accumulation, strategy)
SPLITS = [
    pytest.param(1, 1, "single", marks=pytest.mark.slow),
    pytest.param(1, 2, "single", marks=pytest.mark.slow),
    (1, 4, "single"),
    (2, 1, "ddp"),
    pytest.param(2, 2, "ddp", marks=pytest.mark.slow),
    pytest.param(2, 4, "ddp", marks=pytest.mark.slow),
    pytest.param(2, 1, "fsdp2", marks=pytest.mark.slow),
    pytest.param(2, 2, "fsdp2", marks=pytest.mark.slow),
    (2, 4, "fsdp2"),
]


@pytest.mark.parametrize(("ranks", "accumulate", "strategy"), SPLITS)
def test_same_weights_as_one_big_batch(tmp_path, ranks, accumulate, strategy):
    weights, losses, ids = trained(
        tmp_path / "a", ranks=ranks, accumulate=accumulate, strategy=strategy, steps=20
    )
    # The reference trains on the samples that the ranks drew: these must be the ones of the order.
    order = Order(37, seed=0)
    for number, drawn in enumerate(ids):
        ordered = order[number * BATCH : (number + 1) * BATCH][1].tolist()
        assert sorted(drawn) == sorted(ordered), f"step {number}"
    reference, reference_losses = expected(ids, dtype=torch.float32, optimizer="adamw")
    assert distance(weights, reference) < 1e-5
    assert furthest(losses, reference_losses) < 1e-5


LONG = [
    ("torch.optim.Adafactor", 1, 4, "single"),
    ("adamw", 1, 4, "single"),
    ("adamw", 2, 2, "ddp"),
    ("adamw", 2, 2, "fsdp2"),
    ("sgd", 1, 4, "single"),
    ("sgd", 2, 2, "ddp"),
    ("sgd", 2, 2, "fsdp2"),
    ("muon", 1, 4, "single"),
    ("muon", 2, 2, "fsdp2"),
    ("muon", 2, 2, "ddp"),
    ("torch.optim.Adafactor", 2, 2, "ddp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "ranks", "accumulate", "strategy"), LONG)
def test_same_weights_in_float64_over_300_steps(tmp_path, ranks, accumulate, strategy, optimizer):
    weights, losses, ids = trained(
        tmp_path / "a",
        ranks=ranks,
        accumulate=accumulate,
        strategy=strategy,
        steps=300,
        dtype="float64",
        optimizer=optimizer,
    )
    reference, reference_losses = expected(ids, dtype=torch.float64, optimizer=optimizer)
    assert distance(weights, reference) < 1e-9
    assert furthest(losses, reference_losses) < 1e-9


@pytest.mark.slow
def test_every_split_sees_the_same_samples(tmp_path):
    seen = {}
    for number, (ranks, accumulate, strategy) in enumerate(
        [(1, 1, "single"), (2, 2, "ddp"), (4, 1, "ddp")]
    ):
        _, _, ids = trained(
            tmp_path / str(number), ranks=ranks, accumulate=accumulate, strategy=strategy, steps=12
        )
        seen[ranks] = [sorted(step) for step in ids]
    assert seen[1] == seen[2] == seen[4]
