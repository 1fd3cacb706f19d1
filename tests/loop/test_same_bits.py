"""``batch.grain``: weights, optimizer and log are bit-identical for any number of processes,
sharded or not."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import whole_batches
from oneloop.basics.differences import texts
from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.recipe.parse import read
from oneloop.run.compatibility import input_differences
from own_files import rows, write
from same_bits import SPLITS, different, digest, history, trained
from worlds import ROOT, Ended, each_forked, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.seeds",
    "oneloop.loop.gradients",
    "oneloop.machine.reduction",
    "oneloop.run.compatibility",
    "oneloop.tools.compare.first_difference",
    "oneloop.train",
)

COMMON = [
    "--ema.half_life",
    "200 samples",
    "--optimizer.clip",
    "0.5",
    "--log.every",
    "4",
    "--track",
    "none",
]
COMMON += [
    "--machine.workers",
    "0",
    "--save.every",
    "0",
    "--guard.sigma",
    "6",
]


CONTRAST = [
    "--task.dropout",
    "0.1",
    "--batch.size",
    "64",
    "--batch.grain",
    "8",
    "--eval.every",
    "15",
]


def digits(folder: Path) -> list[str]:
    return ["digits", "--task.dropout", "0.1", "--batch.grain", "8", "--eval.every", "15"]


def language(*more: str):
    def words(folder: Path) -> list[str]:
        data = write(folder / "data", "text", rows(45))
        shape = [
            "--task.layers",
            "3",
            "--task.width",
            "40",
            "--task.block",
            "24",
        ]
        # Llama has none.
        shape += [] if "llama" in more else ["--task.dropout", "0.1"]
        sizes = ["--batch.size", "16", "--batch.grain", "2", "--eval.every", "100"]
        return ["gpt", "--task.data", str(data), *shape, *sizes, *more]

    return words


def snippets(folder: Path) -> list[str]:
    data = write(folder / "data", "jsonl", rows(90))
    shape = [
        "--task.layers",
        "2",
        "--task.width",
        "36",
        "--task.dropout",
        "0.1",
        "--task.length",
        "16",
    ]
    sizes = ["--batch.size", "16", "--batch.grain", "2", "--eval.every", "100"]
    return ["snippets", "--task.data", str(data), *shape, *sizes]


def numbers(folder: Path) -> list[str]:
    """Encoder and decoder, whose evaluations also generate."""
    shape = ["--task.width", "32", "--task.layers", "1", "--task.dropout", "0.1"]
    sizes = ["--batch.size", "16", "--batch.grain", "2", "--eval.every", "100"]
    # an evaluation has the micro-batches of the grain
    generation = ["--eval.micro", "2", "--eval.generate", "9"]
    return ["numbers", *shape, *sizes, *generation]


TASKS = {
    "digits": digits,
    "numbers": numbers,
    "gpt": language(),
    "llama": language(
        "--task.architecture", "llama", "--task.tokenizer", "bpe", "--task.pack", "packed"
    ),
    "snippets": snippets,
    "contrast": lambda folder: [f"{whole_batches.__file__}:Contrast", *CONTRAST],
    "digits by muon": lambda folder: [*digits(folder), "--optimizer.name", "muon"],
    "digits by sgd": lambda folder: [
        *digits(folder),
        "--optimizer.name",
        "sgd",
        "--optimizer.lr",
        "0.05",
    ],
    "gpt by muon": language("--optimizer.name", "muon"),
}


def same(place: Path, words: list[str], splits=SPLITS, **more) -> None:
    """Train these words on each layout and compare all results of the runs."""
    first, *others = (
        trained(place / f"{config}-{ranks}", words, ranks=ranks, config=config, **more)
        for ranks, config in splits
    )
    assert sum(name.startswith("line") for name in first) > 5
    assert {name.split(".")[0] for name in first if name.startswith("state")} >= {
        "state:model",
        "state:optimizer",
    }
    assert [different(first, other) for other in others] == [[]] * len(others)


def test_the_same_bits_on_one_process_and_on_two(tmp_path, capsys):
    # The model, the steps and the evaluations are as small and few as the claim allows.
    words = ["digits", "--task.width", "8", "--task.dropout", "0.1", "--batch.size", "32"]
    words += ["--batch.grain", "8", "--duration", "6", "--eval.every", "6"]
    same(tmp_path, [*words, *COMMON, "--log.every", "1"], SPLITS[:3])
    assert (
        main(
            [
                "verify",
                "--same",
                str(tmp_path / "single-1" / "run"),
                str(tmp_path / "fsdp2-2" / "run"),
            ]
        )
        == 0
    )
    assert "bit-identical at 6 log lines, step 1 to 6" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("task", TASKS)
def test_the_same_bits_for_all_splits(tmp_path, task):
    same(tmp_path, [*TASKS[task](tmp_path), "--duration", "300", *COMMON])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("task", ["digits", "gpt", "snippets"])
def test_the_same_bits_in_half_precision(tmp_path, task):
    same(
        tmp_path,
        [*TASKS[task](tmp_path), "--duration", "100", *COMMON],
        SPLITS[:3],
        options=["--mixed_precision", "bf16"],
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_same_bits_of_compiled_blocks(tmp_path):
    words = [*snippets(tmp_path), "--duration", "20", *COMMON, "--machine.compile", "regional"]
    same(tmp_path, words, SPLITS[:3])


RAGGED = [
    "--batch.size",
    "16",
    "--batch.grain",
    "2",
    "--duration",
    "60",
    "--log.every",
    "1",
    "--eval.every",
    "7",
]
RAGGED += [
    "--save.every",
    "5",
    "--track",
    "none",
    "--machine.workers",
    "0",
    "--ema.half_life",
    "40 samples",
]
MISHAPS = {
    "none": [],
    "a skip": ["--task.spoiled", "5", "--guard.nonfinite", "skip"],
    "a rewind": ["--task.spoiled", "5", "--guard.nonfinite", "rewind"],
}


def ragged(folder: Path, *more: str) -> list[str]:
    """Return the words of a run on sequences of several lengths, with dropout."""
    recipe = folder / "ragged.yaml"
    recipe.write_text("task: tiny.Ragged\n")
    return [
        str(recipe),
        "--task.samples",
        "301",
        "--task.dropout",
        "0.2",
        "--optimizer.clip",
        "0.4",
        *RAGGED,
        *more,
    ]


def test_killed_twice_and_gone_on_in_other_worlds(tmp_path):
    shorter = ["--duration", "18", "--save.every", "3", "--batch.grain", "4"]
    words, draw = ragged(tmp_path, *shorter), random.Random(20)
    undisturbed = trained(tmp_path / "whole", words, ranks=1, config="single")
    deaths = [(2, "ddp", draw.randint(4, 6)), (2, "fsdp2", draw.randint(9, 11))]
    assert history(tmp_path / "killed", words, deaths, (1, "single"), draw) == 2
    assert different(undisturbed, digest(tmp_path / "killed" / "run")) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(20))
def test_random_histories(tmp_path, seed):
    draw = random.Random(seed)
    mishap, optimizer = draw.choice(sorted(MISHAPS)), draw.choice(["adamw", "sgd", "muon"])
    words = ragged(tmp_path, *MISHAPS[mishap], "--optimizer.name", optimizer)
    undisturbed = trained(tmp_path / "whole", words, ranks=1, config="single")
    at, deaths = 0, []
    while (at := at + draw.randint(5, 25)) < 58:
        deaths.append((*draw.choice(SPLITS), at))
    history(tmp_path / "killed", words, deaths, draw.choice(SPLITS), draw)
    assert different(undisturbed, digest(tmp_path / "killed" / "run")) == [], (
        mishap,
        optimizer,
        deaths,
    )


# --- broken on purpose: found by the hash
# -----------------------------------------------------------------------------


def exchanged_leaves(words: list[str]) -> None:
    """Exchange the second leaf and the third. (Exchanging the first and second would not change the
    sum.)"""
    from oneloop.data.batch_layout import BatchLayout

    leaf = BatchLayout.leaf
    BatchLayout.leaf = lambda split, rank, micro: {1: 2, 2: 1}.get(
        at := leaf(split, rank, micro), at
    )
    train(words)


def rank_order(words: list[str]) -> None:
    """Add the ranks' gradients one after another."""
    from oneloop.machine import reduction

    reduction.tree_sum = lambda parts: sum(parts[1:], parts[0])
    train(words)


def float_norm(words: list[str]) -> None:
    """Sum the norm in floating point, shard by shard."""
    from oneloop.loop import gradients

    norm = gradients.global_norm
    gradients.global_norm = lambda parameters, exact: norm(parameters)
    train(words)


def seeded_by_rank(words: list[str]) -> None:
    """Make dropout depend on the rank and its micro-batch."""
    from oneloop.basics.seeds import reseed
    from oneloop.loop.gradients import Gradients

    def by_rank(own: Gradients, micro: int) -> None:
        reseed(own._run.device, own._job.recipe.seed, own._position, own._run.rank, micro)

    Gradients._seed = by_rank
    train(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "ranks", "config"),
    [
        (float_norm, 2, "fsdp2"),
        (exchanged_leaves, 2, "ddp"),
        (exchanged_leaves, 2, "fsdp2"),
        (rank_order, 4, "ddp"),
        (rank_order, 4, "fsdp2"),
        (seeded_by_rank, 2, "ddp"),
    ],
)
def test_a_break_is_found_by_the_hash(tmp_path, broken, ranks, config, capsys):
    words = ragged(tmp_path, "--duration", "40", "--save.every", "0", "--eval.every", "0")
    for place, function, world in (
        ("right", train, (1, "single")),
        ("wrong", broken, (ranks, config)),
    ):
        trained(tmp_path / place, words, ranks=world[0], config=world[1], function=function)
    places = [str(tmp_path / place / "run") for place in ("right", "wrong")]
    assert main(["verify", "--same", *places]) == 1
    said = capsys.readouterr().out
    assert "they differ from step " in said and ": model." in said
    assert main(["verify", "--same", places[0], places[0]]) == 0
    assert "bit-identical at 40 log lines, step 1 to 40" in capsys.readouterr().out


# --- bad input
# --------------------------------------------------------------------------------------------------

ASKED = "batch.grain"
REFUSED = {
    "leaves that are no power of two": (
        ["--batch.grain", "24"],
        ["batch.grain 24", "batch.size 64", "size: 48"],
    ),
    "more than the batch": (
        ["--batch.grain", "128"],
        ["batch.grain 128", "batch.size 64", "nearest size: 128"],
    ),
    "another micro-batch": (["--batch.micro", "4"], ["batch.micro 4", "batch.grain 8"]),
    "one to be found": (["--batch.micro", "auto"], ["batch.micro auto", "batch.grain 8"]),
    "another one in evaluations": (["--eval.micro", "64"], [ASKED, "eval.micro 64"]),
    "adafactor": (
        ["--optimizer.name", "torch.optim.Adafactor"],
        [ASKED, "optimizer.name torch.optim.Adafactor"],
    ),
    "an optimizer of one's own": (
        ["--optimizer.name", "torch.optim.AdamW"],
        [ASKED, "optimizer.name torch.optim.AdamW"],
    ),
    "the whole model compiled": (
        ["--machine.compile", "whole"],
        [ASKED, "machine.compile whole"],
    ),
    "channels last": (["--machine.channels_last", "true"], [ASKED, "channels_last"]),
    "cuDNN's trials": (["--machine.cudnn_benchmark", "true"], [ASKED, "cudnn_benchmark"]),
    "BatchNorm": (["--task.model", "resnet18"], [ASKED, "BatchNorm", "GroupNorm"]),
    "a buffer that moves": (["--task", "moving.Moving"], [ASKED, "buffer seen"]),
}
WORLDS = [
    pytest.param(
        3,
        "ddp",
        ["--batch.grain", "8"],
        ["8 micro-batches", "3 ranks", "powers of two"],
        marks=pytest.mark.slow,
    ),
    (2, "ddp", ["--batch.grain", "64"], ["1 micro-batches", "2 ranks"]),
    pytest.param(4, "hsdp", [], [ASKED, "HSDP", "fsdp2.yaml"], marks=pytest.mark.slow),
]
MOVING = """
from torch import nn, zeros
from tiny import Net, Ragged

class Counting(Net):
    def __init__(self):
        super().__init__(8, 0.0)
        self.register_buffer("seen", zeros(()))

    def forward(self, tokens):
        if self.training:
            self.seen += tokens.shape[0]
        return super().forward(tokens)

class Moving(Ragged):
    def model(self):
        return Counting()
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, Ended]:
    """Run the rejected commands of one process, each in a folder of its own, in one world."""
    commands = []
    for words, _ in REFUSED.values():
        folder = tmp_path_factory.mktemp("refused")
        (folder / "moving.py").write_text(MOVING)
        commands.append((folder, ["digits", "--batch.grain", "8", *words]))
    (found,) = run(each_forked, commands, timeout=580).ok()
    return dict(zip(REFUSED, found, strict=True))


def check_refusal(codes: list[int], output: str, expected_text: list[str]) -> None:
    assert codes == [2] * len(codes), output
    assert all(part in output for part in expected_text), output
    assert "Traceback" not in output


@pytest.mark.timeout(600)  # the first case waits for all of them
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_rejected(refused, kind):
    ended = refused[kind]
    check_refusal([ended.code], ended.output, REFUSED[kind][1])
    assert ended.changed == set()


@pytest.mark.parametrize(("ranks", "config", "words", "expected_text"), WORLDS)
def test_worlds_that_cannot_be_exact_are_rejected(tmp_path, ranks, config, words, expected_text):
    given = ["digits", "--batch.grain", "8", *words]
    world = run(train, given, ranks=ranks, config=config, folder=tmp_path)
    check_refusal(world.codes, world.output, expected_text)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_the_bits_rest_on_is_compared(tmp_path):
    words = ragged(tmp_path, "--duration", "4", "--run.dir", str(tmp_path / "run"))
    run(train, words).ok()
    words[words.index("4")] = "6"
    changed = run(train, [*words, "--run.accept_changes", "true", "--machine.matmul", "high"])
    assert (
        changed.codes == [0]
        and "accepted: batch.grain needs the same machine.matmul: " in changed.output
    )
    words[words.index("6")] = "8"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "oneloop.train", *words, "--machine.matmul", "high"]
    other = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (
        other.returncode == 2
        and "batch.grain needs the same device: cpu" in other.stderr
        and "-> cpu" in other.stderr
    )


def test_other_versions_are_reported():
    about = {
        "device": "cpu",
        "versions": {"torch": "2.11.0", "numpy": "2.0"},
        "machine.matmul": "highest",
    }
    needs = "batch.grain needs the same "
    now = texts(about | {"versions": {"torch": "2.12.0", "numpy": "2.0"}}, needs)
    found = input_differences(texts(about, needs), now)
    assert [*found.values()] == [f"{needs}versions, torch: 2.11.0 -> 2.12.0"]
    assert input_differences(now, now) == {}


# --- odd tasks and command lines
# --------------------------------------------------------------------------------------

FOUND = """
import random
import torch
import torchmetrics
from tiny import Ragged

class Noisy(Ragged):
    '''A loss that draws, in evaluations too; metrics whose states are no sums; a figure that is infinite.'''

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        noise = 1 + 0.1 * torch.rand(()) + 0.1 * random.random()
        odd = torch.tensor(float("inf") if batch["index"][0] % 2 else float("-inf"))
        return loss * noise, {"said": outputs["loss"].mean(1), "odd": odd}

    def metrics(self):
        kinds = {"r": torchmetrics.PearsonCorrCoef(), "mean": torchmetrics.MeanMetric()}
        return torchmetrics.MetricCollection({**kinds, "mae": torchmetrics.MeanAbsoluteError()})

    def update(self, metrics, batch, outputs):
        said, wanted = outputs["said"], batch["target"].float().mean(1)
        metrics["r"].update(said, wanted)
        metrics["mean"].update(said)
        metrics["mae"].update(said, wanted)
"""  # noqa: E501


@pytest.mark.slow
def test_a_loss_that_draws_and_metrics_that_are_no_sums(tmp_path):
    (tmp_path / "noisy.py").write_text(FOUND)
    (tmp_path / "noisy.yaml").write_text("task: noisy.Noisy\n")
    words = [
        str(tmp_path / "noisy.yaml"),
        *RAGGED,
        "--duration",
        "10",
        "--eval.every",
        "4",
        "--machine.workers",
        "1",
    ]
    same(tmp_path, words, SPLITS[:3], folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (["verify", "--same", "one"], "arguments are required: RUN"),
        (["verify", "--same", "one", "two"], "one holds no run"),
        (["verify", "--same", "plain", "plain"], "no hashes in metrics.jsonl"),
        (["verify", "--same", "odd", "plain"], "odd/metrics.jsonl has a damaged line"),
        (["worth", "digits", "--batch.grain", "8"], "batch.grain forbids; remove it"),
    ],
)
def test_what_cannot_be_compared_is_reported(tmp_path, monkeypatch, capsys, words, expected_text):
    monkeypatch.chdir(tmp_path)
    for name, line in (
        ("plain", b'{"step": 1, "train/loss": 1.0}'),
        ("odd", b'{"bits": "ab", "step": Infinity}\n\xff'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(line)
    assert main(words) == 2
    assert expected_text in capsys.readouterr().err


def test_a_grain_takes_the_place_of_what_a_packaged_recipe_states():
    recipe = read(["gpt", "--batch.grain", "4"])
    assert (recipe.batch.grain, recipe.eval.micro) == (4, None)
    assert read(["gpt", "--batch.grain", "null"]).eval.micro == 64
    with pytest.raises(BadInput, match="remove eval.micro"):
        read(["gpt", "--batch.grain", "4", "--eval.micro", "8"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_page(tmp_path):
    page = (ROOT / "docs" / "explanation" / "bit-identical.md").read_text()
    _, commands, _, expected_output, *_ = re.split(r"```(?:text)?\n", page)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines(keepends=True)[-1] == expected_output
