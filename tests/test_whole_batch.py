"""Losses over the whole batch: the gradient is exact on any parallel layout."""

from __future__ import annotations

import pytest

import whole_batches
from worlds import run

LOSSES = ("infonce", "clip", "siglip", "supcon")
DOUBLE = ["--machine.dtype", "float64"]
VARIANTS = {
    "plain": [],
    "recompute": ["--machine.recompute", "full", "--machine.blocks", "[Layer]"],
    "dropout": ["--task.dropout", "0.2", "--machine.recompute", "full", "--machine.blocks", "[Layer]"],
    "lora": ["--task.lora", "true", "--task.dropout", "0.2"],
}
LAYOUTS = {"1 x 32": ("single", 1, 32), "4 x 8": ("single", 1, 8), "DDP 2": ("ddp", 2, 8), "DDP 4": ("ddp", 4, 4)}
LAYOUTS |= {"FSDP2 2": ("fsdp2", 2, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_one_loss_over_the_batch(layout):
    config, ranks, micro = LAYOUTS[layout]
    words = [*DOUBLE, "--batch.micro", str(micro)]
    cases = [(kind, [*words, *variant]) for kind in LOSSES for variant in VARIANTS.values()]
    world = run(whole_batches.gradients, cases, ranks=ranks, config=config)
    assert len(world.ok()[0]) == len(cases)
    for case, (loss, reference, one_forward) in world.results[0].items():
        assert 0 < loss and reference < 1e-12, case
        assert (one_forward < 1e-12) == ("--task.dropout" not in case or layout == "1 x 32"), case
