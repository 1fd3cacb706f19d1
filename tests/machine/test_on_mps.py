"""Apple's GPUs (MPS) have no float64: a run makes none on its device, and sums stay exact."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from accelerate import Accelerator
from torch import Tensor, nn

import fake_cases
import tiny
from no_float64 import ON_HOST, train_and_resume, without_float64
from oneloop.api import fit
from oneloop.basics import wide_sums
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.wide_sums import on_host, wide_dtype
from oneloop.evaluation import evaluate
from oneloop.recipe.parse import read
from oneloop.task_protocol.evaluation_metrics import make_metrics
from oneloop.tasks.light_metrics import Means
from oneloop.tasks.text_regression import TextRegression
from worlds import ROOT, run

pytestmark = pytest.mark.covers(
    "oneloop.api",
    "oneloop.basics.wide_sums",
    "oneloop.data.step_batches",
    "oneloop.evaluation",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.tasks.light_metrics",
    "oneloop.tasks.text_regression",
)

CPU = torch.device("cpu")
MPS = torch.device("mps")

TEN = [
    *("--duration", "10", "--eval.every", "5", "--save.every", "5", "--log.every", "2"),
    *("--schedule.warmup", "2", "--machine.workers", "0", "--track", "none"),
]

# name: a case of helpers/fake_cases.py, and more keys
CASES = {
    "digits": ("digits", "--eval.samples 2"),
    "gpt": ("gpt", "--guard.sigma 6"),
    "llama": ("llama", "--eval.samples 2"),
    "sft": ("lora", "--eval.samples 1 --task.answer 4 --optimizer.lr 1e-3"),
    "images": ("images", "--task.mixup 0.4 --task.cutmix 0.4 --ema.half_life 2"),
}


def chats(file: Path) -> Path:
    """Write forty conversations."""
    lines = []
    for number in range(40):
        question = {"role": "user", "content": f"What is {number} plus one?"}
        answer = {"role": "assistant", "content": f"It is {number + 1}."}
        lines.append(json.dumps({"messages": [question, answer]}))
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("digits", marks=pytest.mark.slow),
        pytest.param("sft", marks=pytest.mark.slow),
        pytest.param("gpt", marks=pytest.mark.slow),
        pytest.param("images", marks=pytest.mark.slow),
    ],
)
def test_a_run_and_its_resume_make_no_float64_on_the_device(tmp_path, name):
    case, more = CASES[name]
    words = [*fake_cases.words(tmp_path, case), *TEN, *more.split()]
    if name == "sft":
        words += ["--task.data", str(chats(tmp_path / "chats.jsonl")), "--task.held_out", "0.2"]
    world = run(train_and_resume, words, folder=tmp_path)
    operators, summaries = world.ok()[0]
    assert operators > 10_000
    assert "resuming from run/checkpoints/step-00000005" in world.output

    # Evaluations and their metrics are those of the run that was not interrupted.
    whole, resumed = summaries
    names = [name for name in whole if "/" in name]
    assert "eval/loss" in names
    assert [resumed[name] for name in names] == [whole[name] for name in names]


class InFloat64(tiny.Ragged):
    """A task whose loss is float64."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, outputs = super().loss(model, batch)
        return loss.double(), outputs


def rejected(words: list[str]) -> str:
    with without_float64(), pytest.raises((BadInput, TypeError)) as error:
        fit(read(words))
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--task.name", "test_on_mps.InFloat64"],
            "TypeError: MPS has no float64: aten._to_copy.default",
        ),
        (["digits", "--machine.dtype", "float64"], "machine.dtype float64"),
    ],
)
def test_a_run_in_float64_is_rejected(tmp_path, words, expected):
    world = run(rejected, [*words, "--duration", "2", "--track", "none"], folder=tmp_path)
    assert expected in world.ok()[0]


class _DoubleSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.double().float()


def test_the_mode_sees_each_way_to_make_float64():
    array = np.ones(2)
    ones = torch.ones(2, requires_grad=True)
    ways = [
        ones.double,
        lambda: ones.detach() * np.ones(2),
        lambda: ones.to(torch.complex128),
        lambda: torch.zeros(2, dtype=torch.float64),
        lambda: torch.tensor(array),
        lambda: torch.tensor([1.0, 2.0], dtype=torch.float64),
        lambda: torch.from_numpy(array) + 1,
        lambda: ones.new_tensor(1.0, dtype=torch.float64),
        lambda: ones.sum(dtype=torch.float64),
        lambda: torch.linspace(0, 1, 5, dtype=torch.float64),
        lambda: _DoubleSlope.apply(ones).sum().backward(),
    ]
    with without_float64() as mode:
        for way in ways:
            with pytest.raises(TypeError, match="MPS has no float64"):
                way()
        assert len(mode.rejected) == len(ways)

        # What is float32, and what is computed from numbers of the host alone, is accepted.
        (ones * 2.0 + float(array.sum())).sum().backward()
        halves = on_host(ones) / 2
        assert halves.dtype is torch.float64
        assert float(halves.sum()) == 1.0
    assert len(ON_HOST) <= 5


def test_tokens_are_counted_beyond_the_integers_of_float32():
    with without_float64():
        metrics = Means({"accuracy": True})
        count = torch.tensor(2**23 + 1)
        for _ in range(9):
            metrics.update({"accuracy": (count - 1, count)})
        assert metrics.compute()["accuracy"] == 2**23 / (2**23 + 1)
        assert metrics.totals()["accuracy"][1] == 9 * (2**23 + 1)


class Values:
    """A task whose losses are its samples."""

    def collate(self, samples: list[float]) -> dict[str, Tensor]:
        return {"value": torch.tensor(samples)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["value"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return batch["value"].sum(), {}


def evaluated(values: list[float]) -> float:
    with without_float64() as mode:
        accelerator = Accelerator()
        found = evaluate(Values(), nn.Linear(1, 1), values, accelerator=accelerator, micro=1)
    assert mode.rejected == []
    return found["loss"]


def test_losses_are_summed_beyond_the_digits_of_float32():
    values = [2.0**24, 1.0, 1.0, 1.0]
    assert run(evaluated, values).ok() == [sum(values) / 4]


def test_metrics_in_float64_stay_on_the_host():
    task = TextRegression.__new__(TextRegression)
    predictions = torch.linspace(-1, 1, 50).square()
    numbers = torch.linspace(-1, 2, 50)

    def computed() -> dict[str, float]:
        metrics = make_metrics(task, "metrics")
        for rows in (slice(0, 20), slice(20, 50)):
            task.update(metrics, {"label": numbers[rows]}, {"prediction": predictions[rows]})
        return {name: float(value) for name, value in metrics.compute().items()}

    expected = computed()
    with without_float64() as mode:
        found = computed()
    assert mode.rejected == [] and found == expected

    # Others move, also those in float64 if the device has it.
    assert make_metrics(task, "metrics", MPS)["pearson"].device == CPU
    meta = make_metrics(task, "metrics", torch.device("meta"))
    assert meta["pearson"].device.type == "meta"


def test_only_one_function_knows_which_devices_have_float64():
    assert [wide_dtype(one) for one in (MPS, CPU)] == [torch.float32, torch.float64]
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.If | ast.IfExp):
                continue
            if "mps" in ast.unparse(node.test) and "torch.float" in ast.unparse(node):
                found.append(f"{file.name}:{node.lineno}")
    assert found == []


class WithDoubleState(torchmetrics.Metric):
    """A metric whose dtype is float32, and whose state is not."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values):
        self.total += values.double().sum()

    def compute(self):
        return self.total


def test_a_metric_with_a_state_in_float64_stays_on_the_host(monkeypatch):
    monkeypatch.setattr(wide_sums, "NO_FLOAT64", {"meta"})
    meta = torch.device("meta")
    task = SimpleNamespace(metrics=WithDoubleState)
    assert make_metrics(task, "metrics", meta).total.device.type == "cpu"
    task = SimpleNamespace(metrics=torchmetrics.MeanMetric)
    assert make_metrics(task, "metrics", meta).mean_value.device.type == "meta"
