"""A model may draw from torch's, numpy's and Python's generators alike: each step draws other
numbers, a resumed run draws those of the uninterrupted one, and an evaluation always the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from oneloop.basics.seeds import other_states, set_other_states
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.seeds",
    "oneloop.loop.gradients",
    "oneloop.run.compatibility",
)

DRAWN = {
    "numpy": np.random.random_sample,
    "gauss": np.random.standard_normal,
    "python": random.random,
    "torch": lambda: float(torch.rand(())),
}


class Noisy(nn.Module):
    """Draws in each forward, in training from the call number ``late`` on."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = -late

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls += self.training
        draws = self.calls > 0 or not self.training
        drawn = {name: draw() if draws else 0.0 for name, draw in DRAWN.items()}
        noise = 0.1 * sum(drawn.values())
        return self.linear(x) + noise, {n: torch.tensor(value) for n, value in drawn.items()}


class Task:
    def __init__(self, late: int = 0) -> None:
        self.late = late

    def model(self) -> nn.Module:
        return Noisy(self.late)

    def train_set(self):
        return [torch.tensor([0.1 * index, 1.0]) for index in range(32)]

    def eval_sets(self):
        return {"validation": self.train_set()[:20]}

    def collate(self, samples):
        return {"x": torch.stack(samples)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        found, drawn = model(batch["x"])
        return found.square().sum(), drawn

    def metrics(self):
        return MetricCollection({name: MeanMetric() for name in DRAWN})

    def update(self, metrics, batch, outputs):
        for name in DRAWN:
            metrics[name].update(outputs[name])


def trained(folder: Path, name: str, *more: str, ranks: int = 1, config: str = "single"):
    """Return the draws of each step, the results of evaluations, final weights, and the output."""
    words = ["digits", "--task", "test_forward_draws.Task", "--track", "none", "--seed", "3"]
    words += ["--duration", "6", "--batch.size", "8", "--log.every", "1"]
    words += ["--batch.micro", str(4 // ranks)]  # two micro-batches per step and rank
    words += ["--eval.every", "3", "--eval.micro", "4", "--save.every", "3", "--save.keep", "9"]
    world = run(
        train, [*words, "--run.dir", name, *more], ranks=ranks, config=config, folder=folder
    )
    world.ok()
    steps, evaluations = {}, {}
    for line in map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines()):
        if "train/numpy" in line:
            steps[line["step"]] = [line[f"train/{kind}"] for kind in DRAWN]
        if "eval/numpy" in line:
            evaluations[line["step"]] = [line[f"eval/{kind}"] for kind in DRAWN]
    return steps, evaluations, load_file(folder / name / "final/model.safetensors"), world.output


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_steps_draw_other_numbers_and_a_resume_the_same(tmp_path, ranks, config):
    world = {"ranks": ranks, "config": config}
    steps, evaluations, weights, _ = trained(tmp_path, "whole", "--machine.workers", "0", **world)
    for kind in zip(*steps.values(), strict=True):
        assert len(set(kind)) == 6
    assert evaluations[3] == evaluations[6]

    # Resume at step 3, with a data worker.
    there = str(next((tmp_path / "whole" / "checkpoints").glob("*3")))
    more = ["--run.resume", there, "--machine.workers", "1"]
    again, evaluated, resumed, _ = trained(tmp_path, "resumed", *more, **world)
    assert again == {step: steps[step] for step in (4, 5, 6)}
    assert evaluated == {6: evaluations[6]}
    assert same(resumed, weights)


@pytest.mark.parametrize(
    ("ranks", "config"), [(1, "single"), pytest.param(2, "ddp", marks=pytest.mark.slow)]
)
def test_a_model_that_begins_to_draw_late_is_reported(tmp_path, ranks, config):
    late = ["--task.late", "4"]  # forwards of the check, and of the first two steps
    steps, _, _, output = trained(tmp_path, "late", *late, ranks=ranks, config=config)
    assert steps[2] == [0.0] * len(DRAWN)
    assert output.count("another parallel layout trains a different model") == 1


def test_states_are_compared_and_restored():
    np.random.standard_normal()  # keeps the second number of a pair
    before = other_states()
    drawn = [draw() for name, draw in DRAWN.items() if name != "torch"]
    assert other_states() != before
    set_other_states(before)
    assert other_states() == before
    assert [draw() for name, draw in DRAWN.items() if name != "torch"] == drawn
