"""Activation (gradient) checkpointing gives bit-identical gradients with much less memory, for any
model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.recompute import parsed, recompute
from small_models import fresh, gradients
from worlds import run, train


@pytest.mark.parametrize(
    ("mode", "saved"), [("full", 0.6), ("every:2", 0.3), ("every:5", 0.05), ("selective", 0.3)]
)
def test_the_same_gradients_and_less_kept(mode, saved):
    expected, usual = gradients(fresh())
    model = fresh()
    names = list(model.state_dict())
    recompute(model, mode)
    found, kept = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # The recomputed blocks keep their inputs themselves; the hooks do not see them.
    inputs = (
        0
        if mode == "selective"
        else (12 if mode == "full" else 12 // int(mode[-1])) * 2 * 24 * 32 * 4
    )
    assert kept + inputs < (1 - saved) * usual
    assert list(model.state_dict()) == names


def test_offloaded_inputs_give_the_same_gradients():
    expected, _ = gradients(fresh())
    model = fresh()
    recompute(model, "full", offload=True)
    found, _ = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_blocks_are_found_in_anyones_model():
    from torchvision import models

    from oneloop.tasks.causal_lm import CausalLM

    assert class_names(blocks(fresh())) == ["Block"]
    assert (len(found := blocks(models.vit_b_16())), class_names(found)) == (12, ["EncoderBlock"])
    assert (len(found := blocks(models.resnet18())), class_names(found)) == (8, ["BasicBlock"])
    gpt = CausalLM(layers=3, data=__file__).model()
    assert (len(found := blocks(gpt)), class_names(found)) == (3, ["GPT2Block"])
    assert len(blocks(gpt, ["GPT2MLP"])) == 3
    with pytest.raises(ValueError, match="machine.blocks Blok: not in Transformer; it has Block"):
        blocks(fresh(), ["Blok"])
    resnet = models.resnet18()
    recompute(resnet, "full")
    resnet(torch.randn(2, 3, 32, 32)).sum().backward()


def test_what_cannot_be_recomputed_is_rejected():
    for bad in ("ful", "every", "every:0", "every:1.5", "budget:2", "full:3"):
        with pytest.raises(ValueError, match="recompute"):
            parsed(bad)
    with pytest.raises(ValueError, match="only 12 blocks"):
        recompute(fresh(), "every:13")
    with pytest.raises(ValueError, match="no repeated blocks"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "full")


@pytest.mark.parametrize(
    ("ranks", "config"), [pytest.param(2, "ddp", marks=pytest.mark.slow), (2, "fsdp2")]
)
def test_a_run_is_the_same_to_the_bit(tmp_path, ranks, config):
    words = [
        "gpt",
        "--task.layers",
        "4",
        "--task.width",
        "16",
        "--task.block",
        "16",
        "--duration",
        "4",
        "--batch.size",
        "8",
        "--batch.micro",
        "2",
        "--track",
        "none",
        "--task.dropout",
        "0.1",
        "--debug.overfit",
        "16",
        "--eval.every",
        "0",
        "--save.every",
        "0",
        "--task.data",
        __file__,
    ]
    found = {}
    for mode in ("none", "full", "every:2", "selective"):
        folder = mode.replace(":", "-")
        world = run(
            train,
            [*words, "--machine.recompute", mode, "--run.dir", folder],
            ranks=ranks,
            config=config,
            folder=tmp_path,
        )
        world.ok()
        assert mode == "none" or f"recompute {mode}: " in world.output
        found[mode] = load_file(tmp_path / folder / "final" / "model.safetensors")
        assert all(torch.equal(found[mode][name], found["none"][name]) for name in found["none"])
