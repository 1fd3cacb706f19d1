"""Optimizers of a model: parameter groups, weight decay, learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oneloop.checkpoint.optimizer_trial import Tried
from oneloop.job.build import build_job
from oneloop.optim import optimizers
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.optimizers import adamw, build, set_lr, sgd
from oneloop.optim.parameter_groups import freeze
from oneloop.recipe.parse import recipe
from tiny import three_layers

pytestmark = pytest.mark.covers(
    "oneloop.job.build",
    "oneloop.job.learning_rate",
    "oneloop.job.optimizer",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.optimizers",
    "oneloop.optim.parameter_groups",
    "oneloop.recipe.schema",
)


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
    from oneloop.job.learning_rate import peak
    from oneloop.recipe.schema import OptimizerConfig

    def rate(name: str, at: int = 64) -> float:
        return peak(OptimizerConfig(name=name, lr=0.1, lr_at_batch=at), 256)

    assert [rate("sgd"), rate("torch.optim.SGD")] == pytest.approx([0.4, 0.4])
    assert [rate("adamw"), rate("torch.optim.Adafactor")] == pytest.approx([0.2, 0.2])
    assert rate("sgd", 0) == 0.1


class TensorRate(torch.optim.SGD):
    """Reads its learning rate on the device, as those of torchao."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=torch.tensor(lr))


class WithNumbers(torch.optim.SGD):
    """Keeps numbers, which a checkpoint can store."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {"steps": [1, 2], "rate": 0.5}


def tried(name: str, **options: Any) -> Tried:
    """Return the result of the trial of a recipe's optimizer."""
    made = recipe("digits", optimizer={"name": name, "clip": 0.0, **options})
    return build_job(made, ranks=1).tried


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("torch.optim.LBFGS", {"weight_decay": 0.0}, "closure.*or choose another optimizer"),
        ("torch.optim.AdamW", {"betas": (2.0, 0.9)}, "Invalid beta.*; correct its options"),
        ("schedulefree.AdamWScheduleFree", {}, "keeps two sets of weights.*with RunState"),
        ("test_optimizers.TensorRate", {"weight_decay": 0.0}, "it keeps lr as a tensor"),
    ],
)
def test_what_cannot_be_trained_is_named_before_the_run(name, options, expected):
    with pytest.raises(ValueError, match=expected):
        tried(name, **options)


def test_the_size_of_the_state_is_measured():
    assert tried("adamw").share == 2.0
    assert tried("test_optimizers.WithNumbers", weight_decay=0.0).share == 0.0


def frozen_model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 2),
    )
    model[:2].requires_grad_(False)
    return model.train()


def test_frozen_modules_in_eval_mode_are_named():
    model = frozen_model()
    assert freeze(model, []) == ["0.1 (BatchNorm1d)", "0.2 (Dropout)"]
    assert [module.training for module in model] == [False, False, True]
    assert freeze(model, []) == []  # they were in eval mode before


class Frozen:
    """A frozen BatchNorm, which sees one batch."""

    collate = staticmethod(torch.utils.data.default_collate)

    def model(self) -> torch.nn.Module:
        return frozen_model()

    def train_set(self) -> list:
        drawn = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return [{"x": 3 * x + 5, "y": n % 2} for n, x in enumerate(drawn)]

    def eval_sets(self) -> dict:
        return {}

    def weight(self, batch: dict) -> torch.Tensor:
        return torch.tensor(float(len(batch["y"])))

    def loss(self, model: torch.nn.Module, batch: dict) -> tuple:
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return each, {"statistics": model[0][1].running_mean.abs().sum().detach()}


def test_frozen_modules_do_not_change_their_statistics(tmp_path, capfd):
    from oneloop import fit

    found = fit(
        Frozen,
        duration=3,
        batch={"size": 64},
        run={"dir": str(tmp_path / "run")},
        track="none",
        log={"every": 1},
    )
    said = capfd.readouterr().out
    assert "in eval mode" in said
    assert found["exit_code"] == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"train/statistics": 0.0' in lines


def test_a_list_is_typed_with_commas():
    from oneloop.recipe.parse import read

    for words in (["0.5,0.999"], ["[0.5, 0.999]"]):
        resolved = read(["digits", "--optimizer.betas", *words]).resolved
        assert list(resolved["optimizer"]["betas"]) == [0.5, 0.999]
    assert read(["digits", "--machine.blocks", "One,Two"]).machine.blocks == ["One", "Two"]
    assert read(["digits", "--track", "none"]).track == []


HOOKED = [(name, exact) for name in ("adamw", "sgd", "muon") for exact in (False, True)]


@pytest.mark.parametrize(("name", "elementwise"), HOOKED)
def test_hooks_run_around_every_step_and_change_no_bit(name, elementwise):
    weights, seen = [], []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        make = getattr(optimizers, name)
        optimizer = build(make, model, lr=0.01, weight_decay=0.1, elementwise=elementwise)
        guard = Guard(optimizer, device=torch.device("cpu"))
        if hooked:
            optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            guard.step(torch.ones(()))
            guard.resolve()
        weights.append([*model.parameters()])
    assert seen == ["before", "after"] * 4
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
