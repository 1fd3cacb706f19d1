"""``batch.grain``: the same bits for any number of processes, sharded or not; of weights, optimizer and log."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_files import rows, write
from same_bits import SPLITS, different, trained

COMMON = ["--ema.half_life", "200 samples", "--optimizer.clip", "0.5", "--log.every", "4", "--track", "none"]
COMMON += ["--machine.workers", "0", "--save.every", "0", "--guard.sigma", "6", "--guard.window", "8"]


def digits(folder: Path) -> list[str]:
    return ["digits", "--task.dropout", "0.1", "--batch.grain", "8", "--eval.every", "15"]


def language(*more: str):
    def words(folder: Path) -> list[str]:
        data = write(folder / "data", "text", rows(45))
        shape = ["--task.layers", "3", "--task.width", "36", "--task.dropout", "0.1", "--task.block", "24"]
        sizes = ["--batch.size", "16", "--batch.grain", "2", "--eval.micro", "2", "--eval.every", "25"]
        return ["gpt", "--task.data", str(data), *shape, *sizes, *more]

    return words


def snippets(folder: Path) -> list[str]:
    data = write(folder / "data", "jsonl", rows(90))
    shape = ["--task.layers", "2", "--task.width", "36", "--task.dropout", "0.1", "--task.length", "16"]
    sizes = ["--batch.size", "16", "--batch.grain", "2", "--eval.micro", "2", "--eval.every", "25"]
    return ["snippets", "--task.data", str(data), *shape, *sizes]


TASKS = {
    "digits": digits,
    "gpt": language(),
    "llama": language("--task.architecture", "llama", "--task.tokenizer", "bpe", "--task.pack", "documents"),
    "snippets": snippets,
    "digits by muon": lambda folder: [*digits(folder), "--optimizer.name", "muon"],
    "digits by sgd": lambda folder: [*digits(folder), "--optimizer.name", "sgd", "--optimizer.lr", "0.05"],
    "gpt by muon": language("--optimizer.name", "muon"),
}


def same(folder: Path, words: list[str], splits=SPLITS, **more) -> None:
    """Trains the words on each split and compares all that is left of the runs."""
    first, *others = (
        trained(folder / f"{config}-{ranks}", words, ranks=ranks, config=config, **more) for ranks, config in splits
    )
    assert sum(name.startswith("line") for name in first) > 5
    assert {name.split(".")[0] for name in first if name.startswith("state")} >= {"state:model", "state:optimizer"}
    assert [different(first, other) for other in others] == [[]] * len(others)


def test_the_same_bits_on_one_process_and_on_two(tmp_path):
    same(tmp_path, [*digits(tmp_path), "--duration", "40", *COMMON], SPLITS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_same_bits_for_all_splits(tmp_path, task):
    same(tmp_path, [*TASKS[task](tmp_path), "--duration", "300", *COMMON])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", "gpt", "snippets"])
def test_the_same_bits_in_half_precision(tmp_path, task):
    same(
        tmp_path,
        [*TASKS[task](tmp_path), "--duration", "100", *COMMON],
        SPLITS[:3],
        options=["--mixed_precision", "bf16"],
    )
