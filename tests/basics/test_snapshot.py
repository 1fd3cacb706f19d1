"""A snapshot names, and restores, every attribute that changes in place or is replaced."""

from __future__ import annotations

import itertools
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from oneloop.basics.snapshot import Snapshot

pytestmark = pytest.mark.covers("oneloop.basics.snapshot")


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
    "model.numpy.state": lambda model: model.numpy.random(),
    "model.older.state": lambda model: model.older.rand(),
    "model.mean": lambda model: model.mean.data.add_(1.0),
    "model.late": lambda model: model.register_buffer("late", torch.zeros(1)),
    "model.layer.late": with_late_module,
    "model.new": lambda model: setattr(model, "new", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_restored(name):
    model = Model()
    before = Snapshot({"model": model})
    digests = before.digests()
    assert before.changed() == []
    CHANGES[name](model)
    assert before.changed() == [name]
    before.restore()
    assert before.changed() == []
    assert Snapshot({"model": model}).digests() == digests


def test_what_is_replaced_comes_back_as_the_same_object():
    model = Model()
    queue, features = model.queue, model.features
    before = Snapshot({"model": model})
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
    before = Snapshot({"task": task})
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
    before = Snapshot({"data": data})
    data.rows[7].append(1)  # inside an element of a long list
    data.large.add_(1.0)
    assert before.changed() == []
    data.rows.append([1])
    assert before.changed() == ["data.rows"]
