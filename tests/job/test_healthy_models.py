"""No check reports anything about models that are right, however often it runs."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from healthy_models import HEALTHY
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.checks.preflight",
    "oneloop.checks.sums",
    "oneloop.job.preflight_result",
    "oneloop.checks.repeats",
    "oneloop.loop.start_lines",
)

LAYOUTS = tuple(product(("single", "ddp", "fsdp2"), (False, True)))
"""configurations (one process, or two), and whether ``batch.grain`` is set"""
QUICK = [("Bert", "single", True), ("TimmVit", "ddp", False)]
"""cases of a few steps"""
DEFAULT = QUICK[:1]
STEPS, FEW = 50, 20
"""steps of most cases, and of those in QUICK"""
COMMON = ["--batch.size", "8", "--optimizer.name", "adamw", "--optimizer.lr", "0.001"]
COMMON += ["--log.every", "1", "--eval.every", "5"]
COMMON += ["--machine.check_every", "5", "--save.every", "0", "--track", "none"]
SIZES = r"batch 8 = \d ranks? x \d micro-batch(es)? x \d; "
USUAL = (
    r"--- rank \d",
    # the model, the batch, the optimizer, the data
    r"recipe: [\d,]+ parameters, 40 samples, (one process|DDP|FSDP2) on cpu, no mixed precision",
    SIZES + r"(20 steps \(20, 160|50 steps \(50, 400) samples\)",
    r"adamw, learning rate 0.001 at most; schedule constant",
    r"evaluation data: validation 8 samples \(eval/…\)",
    r"EMA weights: ema",
    r"frozen: [\d,]+ of [\d,]+ parameters \(0.0 MB\), saved once, in base/; .*",
    # what the machine costs
    r"rank \d on .* slows down all ranks: .*",
    r"\d+ % of the time .*",
    # metrics and results
    r"step \d+(/50|/20)?  .*",
    r"[\d,]+ samples in .*, [\d,]+ samples/s on average",
    r"best eval/loss: .* at step \d+",
    r"final/ holds the last weights, of step \d+(; --save.final best .*)?",
    r"done; results in .*",
    # warnings of torch, each with a line of code
    r".*/torch/.*: UserWarning: .*",
    r"  (output|return|warnings.warn).*",
    r"(grad|bucket_view).sizes\(\) = .*",
    r"\[rank\d\].* find_unused_parameters=True was specified in DDP constructor, but did not .*",
)
"""lines that a run without a finding may print"""


def findings(output: str, *known: str) -> list[str]:
    """Return the lines of a run's output that report something.

    Args:
        output: of all ranks.
        known: expressions for more lines that may be printed.
    """
    usual = re.compile("|".join((*USUAL, *known)))
    return [line for line in output.splitlines() if line.strip() and not usual.fullmatch(line)]


def trained(name: str, config: str, folder: Path, *, grain: bool, more: tuple[str, ...] = ()):
    """Train a model on one process or two; return the exit codes and the output."""
    (folder / "recipe.yaml").write_text(f"task: healthy_models.{name}\n")
    quick = (name, config, grain) in QUICK
    words = [str(folder / "recipe.yaml"), *COMMON, "--duration", str(FEW if quick else STEPS)]
    words += [*HEALTHY[name].words, *more]
    words += ["--run.dir", str(folder / "run")]
    words += ["--batch.grain", "2"] if grain else ["--batch.micro", "2"]
    if config != "single":
        words += ["--ema.half_life", "100 samples"]
    return run(train, words, ranks=1 if config == "single" else 2, config=config)


def check(name: str, config: str, folder: Path, *, grain: bool) -> None:
    """Train a model, and compare what is reported with what is known of it."""
    model = HEALTHY[name]
    world = trained(name, config, folder, grain=grain)
    words = model.rejected.get(config) or (model.rejected.get("grain") if grain else None)
    if words:
        assert set(world.codes) == {2}, world.output
        assert all(word in world.output for word in words), world.output
        return
    world.ok()
    promise = "batch.grain 2: bit-identical on 1 to 4 processes" if grain else model.promise
    known = [f"{re.escape(promise)}.*"]
    if model.unused:
        known.append(rf"parameters without .*: \d+ \(.*{re.escape(model.unused)}.*\)")
    found = findings(world.output, *known)
    assert not found, "\n".join(found)
    assert promise in world.output, world.output


def cases() -> list[Any]:
    """Return all models on all layouts; all but a few of them are slow."""
    found = []
    for name, (config, grain) in product(HEALTHY, LAYOUTS):
        slow = () if (name, config, grain) in DEFAULT else pytest.mark.slow
        label = f"{name}-{config}-{'grain' if grain else 'plain'}"
        found.append(pytest.param(name, config, grain, marks=slow, id=label))
    return found


@pytest.mark.parametrize(("name", "config", "grain"), cases())
def test_nothing_is_reported_of_a_model_that_is_right(tmp_path, name, config, grain):
    check(name, config, tmp_path, grain=grain)


def test_there_are_thirty_models():
    assert len(HEALTHY) >= 30
