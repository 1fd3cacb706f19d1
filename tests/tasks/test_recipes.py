"""The packaged recipes train the same weights on four layouts, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from oneloop.recipe.class_paths import packaged
from oneloop.recipe.parse import read
from splits import distance, furthest
from worlds import CONFIGS, run, train

pytestmark = pytest.mark.covers(
    "oneloop.recipe.parse",
    "oneloop.run.environment",
    "oneloop.tasks.docstring_pairs",
    "oneloop.tasks.rows.text_files",
    "oneloop.train",
)

WAYS = {
    "big": ("single", 1, ["--batch.micro", "64"]),
    "accumulated": ("single", 1, ["--batch.micro", "16"]),
    "ddp": ("ddp", 2, []),
    "fsdp2": ("fsdp2", 2, ["--batch.micro", "8"]),
}
SMALL = {
    "digits": [],
    "gpt": [
        "--task.layers",
        "2",
        "--task.width",
        "32",
        "--task.block",
        "48",
        "--task.pack",
        "padded",
        "--task.data",
        "corpus",
        "--eval.micro",
        "64",
    ],  # ragged: the last sample of each text is shorter
    "llama": [
        "--task.layers",
        "1",
        "--task.width",
        "32",
        "--task.vocab",
        "512",
        "--task.data",
        "corpus",
    ],  # packed
    "sft": ["--task.layers", "1", "--task.width", "32", "--task.length", "64"],  # packed
    "snippets": ["--task.layers", "1", "--task.width", "32", "--eval.micro", "64"],
    "docstrings": ["--task.width", "32", "--task.length", "16", "--task.dropout", "0"],
    "numbers": ["--task.width", "32", "--task.layers", "1", "--eval.generate", "8"],
    "bert": [
        "--task.layers",
        "1",
        "--task.width",
        "32",
        "--task.vocab",
        "512",
        "--task.block",
        "48",
        "--task.data",
        "corpus",
    ],
}
SGD = [
    "--duration",
    "40",
    "--batch.size",
    "64",
    "--optimizer.name",
    "sgd",
    "--optimizer.lr",
    "0.05",
    "--log.every",
    "1",
    "--eval.every",
    "0",
    "--track",
    "none",
]


@pytest.fixture
def corpus(tmp_path):
    from oneloop.tasks.rows.text_files import stdlib

    (tmp_path / "corpus").mkdir()
    for number, document in enumerate(stdlib()[:120]):
        (tmp_path / "corpus" / f"{number:03}.txt").write_text(document.text[: 200 + 37 * number])
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["digits", "gpt", "llama", "sft", "snippets", "docstrings", "bert", "numbers"],
)
def test_the_same_weights_four_ways(corpus, recipe):
    weights, losses = {}, {}
    for way, (config, ranks, words) in WAYS.items():
        run(
            train,
            [recipe, *SGD, *SMALL[recipe], *words, "--run.dir", way],
            ranks=ranks,
            config=config,
            folder=corpus,
        ).ok()
        weights[way] = load_file(corpus / way / "final" / "model.safetensors")
        lines = map(json.loads, (corpus / way / "metrics.jsonl").read_text().splitlines())
        losses[way] = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses["big"]) == 40
    for way in ("accumulated", "ddp", "fsdp2"):
        assert distance(weights[way], weights["big"]) < 1e-5, way
        assert furthest(losses[way], losses["big"]) < 1e-5, way


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_accelerate_launch_as_typed(tmp_path, config):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
        "-m",
        "oneloop.train",
        "digits",
        "--duration",
        "3",
        "--run.dir",
        "run",
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 3
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["processes"] == 2


def test_digits_learns_in_a_few_epochs(tmp_path):
    words = ["digits", "--duration", "6ep", "--track", "none", "--run.dir", "run"]
    # It is evaluated at its end, and nothing else is the claim.
    words += ["--eval.every", "0", "--save.every", "0"]
    run(train, words, folder=tmp_path).ok()
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ended["eval/accuracy"] >= 0.97 and ended["test/accuracy"] >= 0.97


@pytest.mark.slow
def test_digits_reaches_its_stated_accuracy(tmp_path):
    run(train, ["digits", "--run.dir", "run"], folder=tmp_path).ok()
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ended["eval/accuracy"] >= 0.98 and ended["test/accuracy"] >= 0.97


@pytest.mark.slow
def test_the_schedule_is_the_same_on_two_ranks_and_with_accumulation(tmp_path):
    rates = []
    for name, ranks, words in (("one", 1, []), ("two", 2, ["--batch.micro", "8"])):
        run(
            train,
            [
                "digits",
                "--duration",
                "20",
                "--log.every",
                "1",
                "--track",
                "none",
                "--run.dir",
                name,
                *words,
            ],
            ranks=ranks,
            folder=tmp_path,
        ).ok()
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        rates.append([line["train/lr"] for line in lines if "train/lr" in line])
    assert rates[0] == rates[1] and len(rates[0]) == 20


def test_the_packaged_recipes_read_and_print(capsys):
    assert packaged() == [
        "bert",
        "digits",
        "distil",
        "docstrings",
        "gpt",
        "gpt2",
        "images",
        "llama",
        "llama-1b",
        "llama-7b",
        "numbers",
        "preference",
        "sft",
        "snippets",
    ]
    for name in packaged():
        assert read([name]).name == name
    with pytest.raises(SystemExit) as end:
        read(["gpt", "--optimizer.name", "sgd", "--print_config"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    # the betas of the recipe were AdamW's
    assert "momentum: 0.9" in printed and "betas" not in printed


def test_help_documents_every_key(capsys):
    import jsonargparse

    with pytest.raises(SystemExit):
        read(["digits", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    from oneloop.recipe.parse import parser

    made: jsonargparse.ArgumentParser = parser("image_classification", "adamw", "cosine")
    for action in made._actions:
        if action.option_strings and action.dest not in ("help", "print_shtab"):
            assert f"--{action.dest}" in printed
            assert action.help and len(action.help) > 8, f"{action.dest} has no help"


def test_what_is_typed_wins_over_the_file(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "task: image_classification\nbatch: {size: 32}\nseed: 3\noptimizer: sgd\n"
    )
    recipe = read(
        [
            str(tmp_path / "r.yaml"),
            "--batch.size=16",
            "--optimizer.nesterov",
            "--track",
            "tensorboard,wandb",
        ]
    )
    assert (recipe.batch.size, recipe.seed, recipe.optimizer.name) == (16, 3, "sgd")
    assert recipe.optimizer.options == {"momentum": 0.9, "nesterov": True}
    assert recipe.track == ["tensorboard", "wandb"]
    with pytest.raises(AttributeError):
        recipe.batch.size = 3  # the recipe is frozen
