"""Parameter patterns: rates and decay in closed form, frozen parameters, and wrong patterns."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oneloop.machine.blocks import blocks
from oneloop.optim.parameter_groups import chosen, freeze, layer_decay, matches
from reference import sequence_loss
from slow_cases import with_slow
from splits import LR, trained
from tiny import Normed, Ragged, Sequences
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.machine.blocks",
    "oneloop.optim.parameter_groups",
    "oneloop.recipe.schema",
)

LAYOUTS = [("single", 1, 2), ("ddp", 2, 1), ("fsdp2", 2, 2)]
SPLITS = with_slow(LAYOUTS, LAYOUTS[1:])
GROUPS = {
    "embedding": {"freeze": True},
    "head": {"lr_factor": 0.25},
    "*.bias": {"weight_decay": 0.5},
    "inner.weight": {"weight_decay": 0.0, "lr_factor": 3.0},
}
PLAIN = ("--schedule.name", "constant", "--schedule.warmup", "0", "--optimizer.clip", "0")


@pytest.mark.parametrize(("strategy", "ranks", "accumulate"), SPLITS)
def test_one_step_of_sgd_is_the_closed_form_of_each_group(tmp_path, strategy, ranks, accumulate):
    from oneloop.basics.seeds import key

    options = (*PLAIN, "--optimizer.momentum", "0", "--optimizer.groups", json.dumps(GROUPS))
    weights, _, [ids] = trained(
        tmp_path / "a",
        ranks=ranks,
        accumulate=accumulate,
        strategy=strategy,
        steps=1,
        dtype="float64",
        optimizer="sgd",
        extra=options,
    )
    torch.manual_seed(key(0))
    model = Ragged().model().double()
    samples = Sequences(37, seed=1).samples
    total, weight = sequence_loss(model, [samples[i] for i in ids])
    (total / weight).backward()
    expected = {  # learning rate and weight decay of each
        "embedding.weight": (0.0, 0.0),
        "inner.weight": (3 * LR, 0.0),
        "inner.bias": (LR, 0.5),
        "norm.weight": (LR, 0.0),
        "norm.bias": (LR, 0.5),
        "head.weight": (0.25 * LR, 0.1),
        "head.bias": (0.25 * LR, 0.5),
    }
    assert expected.keys() == weights.keys()
    for name, parameter in model.named_parameters():
        rate, decay = expected[name]
        updated = parameter - rate * (parameter.grad + decay * parameter)
        assert torch.allclose(weights[name], updated, rtol=1e-13, atol=1e-15), name
    assert torch.equal(weights["embedding.weight"], model.embedding.weight)


def test_the_start_states_how_many_each_took_and_a_change_is_rejected(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = [
        "r.yaml",
        "--duration",
        "4",
        "--batch.size",
        "16",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    words += ["--ema.half_life", "32", "--optimizer.groups"]
    world = run(train, [*words, json.dumps(GROUPS)], folder=tmp_path)
    world.ok()
    assert "embedding: 104 parameters in 1 tensors: freeze True" in world.output
    assert "*.bias: 45 parameters in 3 tensors: weight_decay 0.5" in world.output
    average = load_file(tmp_path / "run" / "final" / "ema.safetensors")
    last = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert torch.equal(average["embedding.weight"], last["embedding.weight"])
    assert not torch.equal(average["head.weight"], last["head.weight"])
    manifest = json.loads(
        next((tmp_path / "run" / "checkpoints").glob("step-*/MANIFEST.json")).read_text()
    )
    kept = [
        name
        for name in manifest["tensors"]
        if "embedding" in name and not name.startswith("model.")
    ]
    assert kept == []  # no optimizer state, no EMA
    again = run(
        train, [*words, json.dumps({**GROUPS, "head": {"lr_factor": 0.5}})], folder=tmp_path
    )
    assert again.codes == [2] and "optimizer.groups" in again.output


@pytest.mark.parametrize("first", [True, False])
def test_every_other_pattern_overrides_the_defaults(first):
    """``*`` gives defaults: all parameters but some are frozen. The order does not count."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    defaults = {"*": {"freeze": True, "weight_decay": 0.5}}
    others = {"head": {"freeze": False, "lr_factor": 2.0}, "*.bias": {"weight_decay": 0.0}}
    found, taken = chosen(model, {**defaults, **others} if first else {**others, **defaults})
    assert found == {
        "body.weight": {"freeze": True, "weight_decay": 0.5},
        "body.bias": {"freeze": True, "weight_decay": 0.0},
        "head.weight": {"freeze": False, "lr_factor": 2.0, "weight_decay": 0.5},
        "head.bias": {"freeze": False, "lr_factor": 2.0, "weight_decay": 0.0},
    }
    assert len(taken["*"]) == 4
    freeze(model, [name for name, settings in found.items() if settings["freeze"]])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]

    # Other patterns that match everything are no defaults.
    with pytest.raises(
        ValueError, match="'head' and an earlier pattern both take head.weight, and"
    ):
        chosen(model, {"?*": {"freeze": True}, "head": {"freeze": False}})


BAD = {
    "a pattern that matches nothing": (
        {"heads": {"lr_factor": 1}},
        "the pattern 'heads' matches no parameter",
    ),
    "two that disagree": (
        {"head": {"lr_factor": 1}, "*.weight": {"lr_factor": 2}},
        "'*.weight' and an earlier pattern both take head.weight, and disagree on lr_factor",
    ),
    "all frozen": ({"*": {"freeze": True}}, "optimizer.groups freezes all parameters"),
    "no setting": ({"head": {}}, "a pattern without a setting"),
    "a strange setting": ({"head": {"rate": 1}}, "'rate' is not accepted"),
    "a negative rate": ({"head": {"lr_factor": -1}}, "lr_factor must be at least 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_patterns_are_reported(tmp_path, name):
    groups, expected_text = BAD[name]
    words = [
        "digits",
        "--task",
        "tiny.Ragged",
        "--optimizer.groups",
        json.dumps(groups),
        "--run.dir",
        "run",
    ]
    world = run(train, words, folder=tmp_path)
    assert (
        world.codes == [2] and expected_text in world.output and "Traceback" not in world.output
    ), world.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("pattern", "takes"),
    [
        ("backbone", ["backbone.0.weight", "backbone.10.bias"]),
        ("backbone.1", []),
        ("backbone.[0-5]", ["backbone.0.weight"]),
        ("*.bias", ["backbone.10.bias", "head.bias"]),
        ("head.bias", ["head.bias"]),
        ("b*", ["backbone.0.weight", "backbone.10.bias"]),
        ("*", ["backbone.0.weight", "backbone.10.bias", "head.bias"]),
    ],
)
def test_the_language_of_patterns(pattern, takes):
    names = ["backbone.0.weight", "backbone.10.bias", "head.bias"]
    assert [name for name in names if matches(pattern, name)] == takes


def test_tied_weights_are_taken_by_either_name():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["table"].weight
    settings, taken = chosen(model, {"head": {"lr_factor": 0.5}})
    assert settings == {"table.weight": {"lr_factor": 0.5}} and taken == {"head": ["table.weight"]}


def test_layer_wise_decay_by_depth():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11))
    factors = layer_decay(model, blocks(model), 0.5)
    assert factors["transformer.wte.weight"] == factors["transformer.wpe.weight"] == 0.5**4
    for layer in range(3):
        own = {factor for name, factor in factors.items() if f".h.{layer}." in name}
        assert own == {0.5 ** (3 - layer)}
    assert factors["transformer.ln_f.weight"] == 1.0
    with pytest.raises(ValueError, match="has no repeated blocks"):
        layer_decay(nn.Linear(2, 2), blocks(nn.Linear(2, 2)), 0.5)


def test_a_frozen_module_is_in_eval_mode_and_its_statistics_stay():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.BatchNorm1d(3), nn.Linear(3, 1)
    )
    freeze(model, ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(8, 3)).sum().backward()
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert (
        model.training and not model[0].training and not model[0][1].training and model[1].training
    )


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    with_slow([("single", 1), ("ddp", 2), ("fsdp2", 2)], [("ddp", 2), ("fsdp2", 2)]),
)
def test_frozen_layers_keep_their_bits_through_training_and_evaluation(tmp_path, strategy, ranks):
    from oneloop.basics.seeds import key

    (tmp_path / "r.yaml").write_text("task: tiny.Normed\n")
    words = [
        "r.yaml",
        "--duration",
        "6",
        "--batch.size",
        "16",
        "--track",
        "none",
        "--run.dir",
        "run",
        "--eval.every",
    ]
    words += [
        "2",
        "--optimizer.groups",
        json.dumps({"norm": {"freeze": True}, "inner": {"freeze": True}}),
    ]
    run(train, words, ranks=ranks, config=strategy, folder=tmp_path).ok()
    last = load_file(tmp_path / "run" / "final" / "model.safetensors")
    torch.manual_seed(key(0))
    first = Normed().model().state_dict()
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {"embedding.weight", "head.weight", "head.bias"}
