"""Hashes show every change of a tensor; and every tensor and attribute that changes is restored."""

from __future__ import annotations

import itertools
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from oneloop.basics.differences import differences
from oneloop.basics.exit_codes import Inexact
from oneloop.checks.state import Values, restored, state_hashes

pytestmark = pytest.mark.covers("oneloop.checks.state")
CPU = torch.device("cpu")


class Counter:
    of_all = 0

    def __init__(self) -> None:
        self.calls = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.queue = deque([1.0])
        self.table = {"rows": [1, 2]}
        self.features = torch.zeros(3)
        self.weights = np.zeros(3)
        self.counter = Counter()
        self.drawn = torch.Generator()
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(0)
        self.older = np.random.RandomState(0)
        self.file = Path(__file__).open()  # noqa: SIM115


def with_late_module(model):
    model.layer.late = nn.Linear(1, 1)


CHANGES = {
    "model.queue": lambda model: model.queue.append(2.0),
    "model.table.rows": lambda model: model.table["rows"].append(3),
    "model.table.more": lambda model: model.table.update(more=1),
    "model.features": lambda model: model.features.numpy().fill(1.0),
    "model.weights": lambda model: model.weights.fill(1.0),
    "model.counter.calls": lambda model: setattr(model.counter, "calls", 1),
    "Counter.of_all": lambda model: setattr(Counter, "of_all", Counter.of_all + 1),
    "model.drawn": lambda model: torch.rand(1, generator=model.drawn),
    "model.python": lambda model: model.python.random(),
    "model.numpy": lambda model: model.numpy.random(),
    "model.older": lambda model: model.older.rand(),
    "model.mean": lambda model: model.mean.data.add_(1.0),
    "model.late": lambda model: model.register_buffer("late", torch.zeros(1)),
    "model.layer.late": with_late_module,
    "model.new": lambda model: setattr(model, "new", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_restored(name):
    model = Model()
    before = state_hashes(model)
    with restored(CPU, model, {}) as values:
        assert values.changed() == []
        CHANGES[name](model)
        assert values.changed() == [name]
    assert values.changed() == []
    assert state_hashes(model) == before


def test_what_is_replaced_comes_back_as_the_same_object():
    model = Model()
    queue, features = model.queue, model.features
    before = Values({"model": model}, {id(one) for one in model.buffers()})
    model.queue = deque([2.0])
    model.features = model.features + 1
    assert sorted(before.changed()) == ["model.features", "model.queue"]
    before.restore()
    assert model.queue is queue and model.features is features
    assert list(queue) == [1.0] and features.sum() == 0


def test_what_cannot_be_compared_is_left_alone():
    class Task:
        def __init__(self) -> None:
            self.numbers = itertools.count()
            self.read = (line for line in ["a", "b"])
            self.model = Model()

    task = Task()
    before = Values({"task": task}, set())
    assert (next(task.numbers), next(task.read)) == (0, "a")
    before.restore()
    assert (next(task.numbers), next(task.read)) == (1, "b")
    assert not task.model.file.closed


def test_long_containers_and_large_tensors_are_not_copied():
    class Data:
        def __init__(self) -> None:
            self.rows = [[n] for n in range(5000)]
            self.large = torch.zeros(1 << 25)

    data = Data()
    before = Values({"data": data}, set())
    data.rows[7].append(1)  # inside an element of a long list
    data.large.add_(1.0)
    assert before.changed() == []
    data.rows.append([1])
    assert before.changed() == ["data.rows"]


# --- Tensors, whatever torch knows of a write.
# -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.large = nn.Parameter(torch.zeros(600, 500))
        self.register_buffer("code", torch.arange(6, dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("wide", torch.zeros(2, 3, 4).transpose(0, 2))
        self.register_buffer("later", None)


def moved(model) -> None:
    model.large.data = torch.ones(600, 500)


def registered(model) -> None:
    model.register_buffer("late", torch.zeros(1))


def filled(model) -> None:
    model.later = torch.zeros(2)


def renamed(model) -> None:
    model._buffers["other"] = model._buffers.pop("code")


def replaced(model) -> None:
    model.layer = nn.Linear(4, 3, dtype=torch.float64)


def shortened(model) -> None:
    model.code.data = model.code.data[:2]


def tied(model) -> None:
    model.layer.bias = nn.Parameter(model.layer.weight.detach()[:, 0])


TENSORS = {
    "parameter layer.weight": lambda model: model.layer.weight.data.mul_(2.0),
    "parameter layer.bias": lambda model: model.layer.bias.detach().numpy().fill(3.0),
    "parameter large": moved,
    "buffer code": lambda model: model.code.copy_(model.code.roll(1)),
    "buffer flag": lambda model: model.flag.fill_(True),
    "buffer phase": lambda model: model.phase.data[2].fill_(1j),
    "buffer wide": lambda model: model.wide.set_(torch.ones(4, 3, 2)),
    "parameter layer.weight, too": replaced,
    "parameter layer.bias, too": tied,
    "buffer late": registered,
    "buffer later": filled,
    "buffer other": renamed,
    "buffer code, too": shortened,
    "parameter large, too": lambda model: model.large.requires_grad_(False),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("most", [1 << 30, 1 << 10])
def test_a_changed_tensor_is_named_and_restored(name, most):
    model = Net()
    before = state_hashes(model)
    objects = dict(model.named_parameters())
    found = []
    error = None
    try:
        with restored(CPU, model, {}, most=most):
            TENSORS[name](model)
            found = [*differences(before, state_hashes(model))]
    except Inexact as raised:
        error = str(raised)
    if error is not None:  # parameters of more than 1 KB are not copied
        assert most == 1 << 10
        assert "because it changes the parameter" in error
        return
    assert name.removesuffix(", too") in found
    assert state_hashes(model) == before
    assert all(one is objects[key] for key, one in model.named_parameters())


def test_equal_contents_are_no_change():
    model = Net()
    before = state_hashes(model)
    model.layer.weight.data.copy_(model.layer.weight.clone())
    model.code = model.code.clone()
    model.wide = model.wide.clone()
    assert differences(before, state_hashes(model)) == {}


def test_the_state_of_an_optimizer_is_hashed():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = state_hashes(model, optimizer)
    optimizer.state[model.layer.bias]["exp_avg"].data[1] += 1
    assert [*differences(before, state_hashes(model, optimizer))] == [
        "optimizer layer.bias.exp_avg"
    ]
