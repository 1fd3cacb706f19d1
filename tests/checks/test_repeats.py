"""A repeated micro-batch shows state that samples, seeds and weights do not determine, and changes
nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oneloop.checks.passes import Measure, run_pass
from oneloop.checks.reports import difference
from oneloop.job.build import Intervals
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.checks.passes",
    "oneloop.checks.repeats",
    "oneloop.checks.reports",
    "oneloop.checks.tolerance",
    "oneloop.job.build",
)

WORDS = ["--batch.size", "16", "--batch.micro", "4", "--duration", "16", "--machine.dtype"]
WORDS += ["float64", "--track", "none", "--log.every", "1", "--machine.workers", "0"]
WORDS += ["--eval.every", "0", "--save.every", "4", "--machine.check_every", "4"]


def trained(folder: Path, task: str, *words: str, config: str = "ddp"):
    """Return the world that has trained a task of late_state.py, and its run folder."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(f"task: late_state.{task}\n")
    given = [str(folder / "recipe.yaml"), *WORDS, *words, "--run.dir", str(folder / "run")]
    return run(train, given, ranks=1 if config == "single" else 2, config=config), folder / "run"


def grain(words: list[str]) -> list[str]:
    at = words.index("--batch.micro")
    return [*words[:at], "--batch.grain", *words[at + 1 :]]


@pytest.mark.parametrize(
    ("task", "found"),
    [
        ("LateQueue", "seeds and weights the second time; what changed in between: model"),
        ("LateRank", "ranks 0 and 1 got|ranks 1 and 0 got"),
        pytest.param("LateRows", "has loaded other values of 'x'", marks=pytest.mark.slow),
    ],
)
def test_late_state_is_reported_once(tmp_path, task, found):
    world, _ = trained(tmp_path, task)
    world.ok()
    lines = [line for line in world.output.splitlines() if "for the same micro-batch" in line]
    lines += [line for line in world.output.splitlines() if "has loaded other values" in line]
    assert len(lines) == 1, world.output
    assert any(words in lines[0] for words in found.split("|")), lines
    if task == "LateQueue":
        assert "model.queue" in lines[0]


def test_with_the_grain_late_state_ends_the_run_and_a_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("test_repeats.WORDS", grain(WORDS))
    world, folder = trained(tmp_path, "LateQueue")
    assert set(world.codes) == {1}
    summary = (folder / "summary.json").read_text()
    assert "model.queue" in summary and "was still right" in summary
    assert not (folder / "final").exists()


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("Drawn", "ddp"),
        pytest.param("Drawn", "fsdp2", marks=pytest.mark.slow),
        pytest.param("Right", "fsdp2", marks=pytest.mark.slow),
        pytest.param("LateQueue", "single", marks=pytest.mark.slow),
    ],
)
def test_repeats_change_no_bit(tmp_path, task, config):
    weights, shorter = [], ["--duration", "8", "--save.every", "0"]
    for every in ("4", "0"):
        world, folder = trained(
            tmp_path / every, task, *shorter, "--machine.check_every", every, config=config
        )
        world.ok()
        assert ("machine.check_every 0" in world.output) == (every == "0")
        found = task == "LateQueue" and every == "4"
        assert ("the same micro-batch" in world.output) == found
        weights.append(load_file(folder / "final" / "model.safetensors"))
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_gradients_that_are_not_finite_are_nodifference():
    nan = float("nan")
    bias = Measure(1, 2.0, 2.0)
    loss = Measure(1.0, 1.0, 1.0)
    one = {"": loss, "w": Measure(3, nan, nan), "b": bias}
    other = {"": loss, "w": Measure(4, nan, nan), "b": bias}
    assert difference(one, other, {}) == ""
    finite = {"": loss, "w": Measure(4, 0.5, 0.5), "b": bias}
    assert "gradients of w" in difference(one, finite, {})


def test_a_pass_measures_gradients_and_leaves_none():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    unused = torch.nn.Linear(2, 2)
    model.add_module("unused", unused)
    x = torch.randn(5, 3)

    def loss_of(rows):
        return lambda: model[1](model[0](rows)).square().sum()

    whole = run_pass(model, loss_of(x))
    parts = [run_pass(model, loss_of(row[None])) for row in x]
    assert whole.keys() == {"", "0.weight", "0.bias", "1.weight", "1.bias"}
    for name, gradient in whole.items():
        total = sum(part[name].product for part in parts)
        assert gradient.product == pytest.approx(total, rel=1e-5)
    assert whole["0.weight"] == run_pass(model, loss_of(x))["0.weight"]
    assert all(parameter.grad is None for parameter in model.parameters())


def steps(until: int, *, log: int, check: int, total: int = 100_000) -> list[int]:
    """Return the steps at which a run repeats a micro-batch."""
    intervals = Intervals({"log": log, "check": check}, total)
    return [step for step in range(1, until + 1) if intervals.is_repeated(step, seed=3)]


def test_repeats_are_early_and_then_rare():
    found = steps(10_000, log=1, check=1000)
    assert sum(step < 4 for step in found) == 1
    assert sum(4 <= step < 16 for step in found) == 1
    assert len([step for step in found if step < 1024]) in (5, 6)
    assert 8 <= len([step for step in found if step >= 1024]) <= 10

    # only log steps, and the last one
    assert all(step % 20 == 0 for step in steps(9_999, log=20, check=1000))
    assert steps(7, log=1000, check=1000, total=7) == [7]
    assert steps(50, log=5, check=1) == [*range(5, 55, 5)]
