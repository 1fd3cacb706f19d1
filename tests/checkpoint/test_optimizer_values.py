"""What a checkpoint of a script holds: all that the script may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, lr_scheduler

from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.resume import RunState
from oneloop.ema import EMA, EMASettings
from sync_saves import SyncCheckpoints

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.optimizer_values",
    "oneloop.checkpoint.resume",
)

SCHEDULES = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 6], 0.1),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


class Script:
    """A script with a scheduler of torch."""

    def __init__(self, folder: Path, schedule: str, *, prepared: bool, **settings: Any) -> None:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, **settings)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        if prepared:
            self.model, self.optimizer, self.schedule = accelerator.prepare(
                self.model, self.optimizer, self.schedule
            )
        self.state = RunState(self.model, self.optimizer, parts={"schedule": self.schedule})
        self.checkpoints = SyncCheckpoints(folder, accelerator)

    def train(self, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.model(torch.ones(4, 2)).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return rates


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduler_continues(tmp_path, schedule, prepared):
    whole = Script(tmp_path / "whole", schedule, prepared=prepared)
    rates = whole.train(10)
    first = Script(tmp_path / "run", schedule, prepared=prepared)
    before = first.train(5)
    first.state.save(first.checkpoints, 5)
    second = Script(tmp_path / "run", schedule, prepared=prepared)
    second.state.resume(second.checkpoints, "auto")
    assert before + second.train(5) == rates
    assert torch.equal(second.model.weight, whole.model.weight)


def test_settings_of_groups_are_restored(tmp_path):
    first = Script(tmp_path, "steps", prepared=False)
    group = first.optimizer.param_groups[0]
    group["weight_decay"] = 0.5
    group["betas"] = (0.5, 0.9)
    first.train(1)
    first.state.save(first.checkpoints, 1)
    second = Script(tmp_path, "steps", prepared=False, fused=True)
    second.state.resume(second.checkpoints, "auto")
    restored = second.optimizer.param_groups[0]
    assert restored["weight_decay"] == 0.5 and restored["betas"] == (0.5, 0.9)
    assert restored["fused"] is True  # how the machine computes the update


class Counting(SGD):
    """Counts in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.defaults["k"] = 0
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["k"] += 1


def saved(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> Checkpoints:
    checkpoints = SyncCheckpoints(folder, Accelerator(cpu=True))
    RunState(model, optimizer, parts={}, **more).save(checkpoints, 1)
    return checkpoints


def test_counters_in_groups_are_restored(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = Counting(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.step()
    checkpoints = saved(tmp_path, model, optimizer)
    again = Counting(model.parameters(), 0.1)
    RunState(model, again, parts={}).resume(checkpoints, "auto")
    assert again.param_groups[0]["k"] == 3


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.25))
    checkpoints = saved(tmp_path, model, optimizer)
    again = Adam(model.parameters(), lr=torch.tensor(0.5))
    rate = again.param_groups[0]["lr"]
    RunState(model, again, parts={}).resume(checkpoints, "auto")
    assert again.param_groups[0]["lr"] is rate and rate == 0.25


def test_another_optimizer_is_rejected_before_the_load(tmp_path):
    model = nn.Linear(1, 1)
    checkpoints = saved(tmp_path, model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match=r"has the state of SGD \w+, but Adam \w+ is given"):
        RunState(model, Adam(model.parameters()), parts={}).resume(checkpoints, "auto")
    assert not model.weight.any()


def test_groups_in_another_order_are_rejected_before_the_load(tmp_path):
    """Else the weights would get the decay of the biases."""
    model = nn.Linear(1, 1)
    groups = [
        {"params": [model.weight], "weight_decay": 0.1},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    checkpoints = saved(tmp_path, model, AdamW(groups))
    nn.init.zeros_(model.weight)
    with pytest.raises(
        ValueError, match=r"has the state of AdamW \w+, AdamW \w+, but AdamW \w+, AdamW \w+ is"
    ):
        RunState(model, AdamW(groups[::-1]), parts={}).resume(checkpoints, "auto")
    assert not model.weight.any()
    RunState(model, AdamW(groups), parts={}).resume(checkpoints, "auto")
    assert model.weight.all()


def test_an_optimizer_whose_state_a_file_cannot_hold_is_named(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 1)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(
        ValueError, match="LBFGS keeps .*, which a checkpoint cannot store .*use another"
    ):
        saved(tmp_path, model, optimizer)


# Frozen parameters.


def test_a_target_network_is_saved_as_it_is(tmp_path):
    """Frozen for autograd, but a script averages into it: DQN, BYOL."""
    models = {"online": nn.Linear(2, 1), "target": nn.Linear(2, 1).requires_grad_(False)}
    optimizer = SGD(models["online"].parameters(), lr=0.1)
    checkpoints = SyncCheckpoints(tmp_path, Accelerator(cpu=True))
    state = RunState(models, optimizer, parts={})
    for step in range(1, 4):
        models["target"].weight.data.lerp_(models["online"].weight.data, 0.5)
        state.save(checkpoints, step)
    target = models["target"].weight.clone()
    nn.init.zeros_(models["target"].weight)
    state.resume(checkpoints, "auto")
    assert torch.equal(models["target"].weight, target)
    assert [one.name for one in tmp_path.parent.iterdir() if one.name == "base"] == []


def test_two_runs_in_one_folder_keep_their_frozen_parameters(tmp_path):
    states = {}
    for name, value in {"a": 1.0, "b": 2.0}.items():
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        nn.init.constant_(model[0].weight, value)
        checkpoints = SyncCheckpoints(tmp_path / name, Accelerator(cpu=True))
        state = RunState(model, SGD(model[1].parameters(), lr=0.1), parts={})
        state.save(checkpoints, 1)
        states[name] = (state, checkpoints, model, value)
    for state, checkpoints, model, value in states.values():
        nn.init.zeros_(model[0].weight)
        state.resume(checkpoints, "auto")
        assert (model[0].weight == value).all()


class Clash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)
        self.weight = nn.Parameter(torch.ones(1, 2))


def test_two_tensors_of_one_name_are_rejected(tmp_path):
    model = Clash()
    with pytest.raises(ValueError, match="two tensors of the model have the name model.weight"):
        saved(tmp_path, model, SGD(model.parameters(), lr=0.1))


# Parts.


def test_tensors_and_counters_of_an_ema_are_restored(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    made = [EMA(model, EMASettings(decay=0.9, start=2)) for _ in range(2)]
    for _ in range(4):
        nn.init.normal_(model.weight)
        made[0].update(1)
    checkpoints = SyncCheckpoints(tmp_path, Accelerator(cpu=True))
    states = [RunState(model, optimizer, parts={"e": ema}) for ema in made]
    states[0].save(checkpoints, 1)
    states[1].resume(checkpoints, "auto")
    assert made[1].state_dict() == made[0].state_dict()
    for name, tensor in made[0].tensors().items():
        assert torch.equal(made[1].tensors()[name], tensor)


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_keys_that_are_numbers_stay_numbers_and_other_parts_are_reported(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    checkpoints = SyncCheckpoints(tmp_path, Accelerator(cpu=True))
    value = {1: {"a": [{2.5: 3}]}, None: "x"}
    parts = {"kept": Plain(value), "data": Plain()}
    RunState(model, optimizer, parts=parts).save(checkpoints, 1)
    said: list[str] = []
    kept = Plain()
    again = RunState(model, optimizer, parts={"kept": kept, "loader": Plain()})
    again.resume(checkpoints, "auto", say=said.append)
    assert kept.value == value
    assert said[0] == "of the checkpoint, the state of data is not used: no part has the name"
    assert said[1] == "the checkpoint has no state of loader, which begins without one"


def test_wrong_names_of_parts_and_emas_are_rejected():
    first = nn.ModuleDict({"b": nn.Linear(1, 1, bias=False)})
    models = {"one": first, "two": nn.Linear(1, 1, bias=False)}
    optimizer = SGD([*first.parameters(), *models["two"].parameters()], lr=0.1)
    with pytest.raises(ValueError, match="a part has the name optimizer"):
        RunState(models, optimizer, parts={"optimizer": Plain()})
    emas = {
        "a": EMA(first, EMASettings(half_life=9, name="x")),
        "b": EMA(models["two"], EMASettings(half_life=9, name="x.b")),
    }
    with pytest.raises(ValueError, match="tensors of two EMAs have one name"):
        RunState(models, optimizer, parts=emas)
