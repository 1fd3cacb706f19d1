"""User data files from the command line: every kind and every task, on one process, DDP and
FSDP2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from own_files import bulk, images, rows, steps_of, write
from slow_cases import with_slow
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.rows.cached_arrays",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.image_rows",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.rows.parquet",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_regression",
    "oneloop.tasks.text_rows",
    "oneloop.tasks.token_classification",
)

SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]
COMMON = [
    "--duration",
    "12",
    "--batch.size",
    "8",
    "--log.every",
    "6",
    "--save.every",
    "6",
    "--track",
    "none",
]
COMMON += ["--task.held_out", "0.2", "--machine.dtype", "float64"]
SPLITS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
CASES = {
    "text in parquet": ("text_classification", "parquet", [*SMALL, "--task.length", "16"]),
    "text in json lines": ("text_classification", "jsonl", [*SMALL, "--task.length", "16"]),
    "text in csv": ("text_classification", "csv", [*SMALL, "--task.length", "16"]),
    "text in arrow": ("text_classification", "arrow", [*SMALL, "--task.length", "16"]),
    "pairs of texts": (
        "text_classification",
        "jsonl",
        [*SMALL, "--task.length", "32", "--task.second", "text"],
    ),
    "numbers in csv": (
        "text_regression",
        "csv",
        [*SMALL, "--task.length", "16", "--task.label", "number"],
    ),
    "numbers in parquet": (
        "text_regression",
        "parquet",
        [*SMALL, "--task.length", "16", "--task.label", "number"],
    ),
    "words in parquet": ("token_classification", "parquet", [*SMALL, "--task.length", "24"]),
    "words in json lines": ("token_classification", "jsonl", [*SMALL, "--task.length", "24"]),
    "pictures in folders": (
        "image_classification",
        "folders",
        ["--task.width", "8", "--task.image_size", "8"],
    ),
    "pictures in parquet": (
        "image_classification",
        "parquet",
        ["--task.width", "8", "--task.image_size", "8"],
    ),
    "a language in parquet": ("causal_lm", "parquet", [*SMALL, "--task.block", "8"]),
    "a language in texts": ("causal_lm", "text", [*SMALL, "--task.block", "8"]),
    "a language in csv": (
        "causal_lm",
        "csv",
        [*SMALL, "--task.block", "8", "--task.tokenizer", "bpe"],
    ),
}
EVERYWHERE = (
    "text in parquet",
    "numbers in csv",
    "words in json lines",
    "pictures in parquet",
    "a language in parquet",
)
SLOW = (
    "text in parquet",
    "text in json lines",
    "text in arrow",
    "numbers in csv",
    "words in json lines",
    "pictures in parquet",
    "a language in parquet",
    "a language in texts",
    "a language in csv",
)


def words_for(name: str, folder: Path) -> list[str]:
    task, kind, options = CASES[name]
    if task == "image_classification":
        images(folder, kind)
    else:
        write(folder, kind, rows(120))
    return ["digits", "--task", task, "--task.data", str(folder), *options, *COMMON]


def trained(
    words: list[str], where: Path, config: str, ranks: int
) -> tuple[dict[str, torch.Tensor], dict]:
    world = run(train, [*words, "--run.dir", config], ranks=ranks, config=config, folder=where)
    world.ok()
    return load_file(where / config / "final" / "model.safetensors"), json.loads(
        (where / config / "summary.json").read_text()
    )


@pytest.mark.parametrize("name", with_slow(CASES, SLOW))
def test_every_kind_of_file_trains_every_task(tmp_path, name):
    words = words_for(name, tmp_path / "own")
    splits = SPLITS if name in EVERYWHERE else SPLITS[:1]
    weights, ended = {}, {}
    for config, ranks in splits:
        weights[config], ended[config] = trained(words, tmp_path, config, ranks)
    for config, _ in splits[1:]:
        for tensor in weights["single"]:
            assert torch.allclose(
                weights["single"][tensor], weights[config][tensor], rtol=1e-8, atol=1e-9
            ), (
                config,
                tensor,
            )
        for figure, value in ended["single"].items():
            if figure.startswith(("eval/", "test/")):
                assert ended[config][figure] == pytest.approx(value, rel=1e-5, abs=1e-6), (
                    config,
                    figure,
                )
    metrics = {name.partition("/")[2] for name in ended["single"] if name.startswith("eval/")}
    expected = {
        "text_classification": {"accuracy", "macro_f1", "matthews"},
        "token_classification": {"accuracy", "macro_f1", "matthews", "words_cut"},
        "image_classification": {"accuracy", "macro_f1", "matthews"},
        "text_regression": {"spearman", "pearson", "mean_absolute_error"},
        "causal_lm": {"perplexity", "accuracy", "bits_per_byte"},
    }[CASES[name][0]]
    assert expected | {"loss"} == metrics
    inputs = json.loads((tmp_path / "single" / "environment.json").read_text())["inputs"]
    files = {p.relative_to(tmp_path / "own").as_posix() for p in _data_files(tmp_path)}
    assert {f"train set, files, {file}" for file in files} == {
        name for name in inputs if name.startswith("train set, files, ")
    }


def _data_files(where: Path) -> list[Path]:
    return [path for path in (where / "own").rglob("*") if path.suffix not in ("", ".json")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in EVERYWHERE])
def test_every_other_kind_is_the_same_on_several_processes(tmp_path, name):
    words = words_for(name, tmp_path / "own")
    one, _ = trained(words, tmp_path, "single", 1)
    for config in ("ddp", "fsdp2"):
        several, _ = trained(words, tmp_path, config, 2)
        assert all(
            torch.allclose(one[tensor], several[tensor], rtol=1e-8, atol=1e-9) for tensor in one
        )


# --- more data than memory
# --------------------------------------------------------------------------------------------


def numbered(
    where: Path,
    data: Path,
    *,
    ranks: int,
    micro: int,
    workers: int,
    steps: int,
    window: int,
    kill: int = 0,
):
    """Train the numbered rows in a separate folder; return the world and the ids of each step of
    this start."""
    words = [
        "digits",
        "--task",
        "own_files.Numbered",
        "--task.data",
        str(data),
        "--task.window",
        str(window),
    ]
    words += [
        "--task.kill_at",
        str(kill),
        "--duration",
        str(steps),
        "--batch.size",
        "64",
        "--batch.micro",
        str(micro),
    ]
    words += [
        "--machine.check_every",
        "0",  # a check would load micro-batches again
        "--machine.workers",
        str(workers),
        "--save.every",
        "20",
        "--eval.every",
        "0",
        "--track",
        "none",
    ]
    folder = where / "notes"
    folder.mkdir(exist_ok=True)
    # The task's own switch is not part of the training configuration that a resume compares.
    words += [
        "--run.dir",
        "run",
        "--run.accept_changes",
        "true",
        "--optimizer.lr",
        "1e-3",
    ]
    world = run(
        train, words, ranks=ranks, folder=where, variables={"OWN_FOLDER": str(folder)}, timeout=1500
    )
    return world, steps_of(folder, ranks=ranks, micro=micro, batch=64)


def elastic(
    where: Path,
    data: Path,
    total: int,
    *,
    window: int,
    most: float,
    most_steps: int = 60,
    epochs: int = 1,
) -> None:
    """Train undisturbed on 1, 2 and 4 ranks; also kill, and resume with other numbers of ranks and
    workers."""
    per_epoch = None
    whole: list[list[int]] = []
    for ranks, micro, workers in ((1, 64, 0), (2, 16, 1), (4, 16, 0)):
        own = where / f"ranks-{ranks}"
        own.mkdir()
        steps = epochs * total // 64 if ranks == 1 else min(most_steps, epochs * total // 64)
        world, seen = numbered(
            own, data, ranks=ranks, micro=micro, workers=workers, steps=steps, window=window
        )
        world.ok()
        whole = whole or seen
        assert len(seen) == steps and seen == whole[:steps]
        per_epoch = per_epoch or int(
            world.output.split(" samples, one process")[0].split()[-1].replace(",", "")
        )
    drawn = [id for step in whole[: per_epoch // 64] for id in step]
    assert len(drawn) == len(set(drawn)) >= per_epoch - 64  # each row once
    broken = where / "broken"
    broken.mkdir()
    world, seen = numbered(
        broken, data, ranks=1, micro=32, workers=2, steps=60, window=window, kill=60
    )
    assert world.codes == [-9] and seen == whole[: len(seen)] and len(seen) >= 25
    world, seen = numbered(
        broken, data, ranks=2, micro=16, workers=0, steps=60, window=window, kill=50
    )
    assert world.codes == [-9, -9] and "resuming from" in world.output
    at = int(world.output.split("resuming from run/checkpoints/step-")[1].split()[0])
    assert at >= 20 and seen == whole[at : at + len(seen)] and len(seen) >= 15
    world, seen = numbered(broken, data, ranks=4, micro=8, workers=1, steps=60, window=window)
    world.ok()
    at = int(world.output.split("resuming from run/checkpoints/step-")[1].split()[0])
    assert at >= 20 and seen == whole[at:60] and len(seen) == 60 - at
    memory = {
        path.name: float(path.read_text()) for path in where.rglob("memory-*") if path.read_text()
    }
    assert memory and max(memory.values()) < most, memory


@pytest.mark.slow
def test_parquet_larger_than_the_window_is_read_in_place(tmp_path):
    total = bulk(tmp_path / "data", megabytes=30, files=20, group=33, letters=2950)
    elastic(tmp_path, tmp_path / "data", total, window=4, most=200, most_steps=total)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_gigabytes_of_parquet_need_less_than_one_of_memory(tmp_path):
    total = bulk(tmp_path / "data", megabytes=3000, files=200, group=1500)
    try:
        elastic(tmp_path, tmp_path / "data", total, window=256, most=1000)
    finally:
        shutil.rmtree(tmp_path / "data")
