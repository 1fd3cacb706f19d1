"""Whole runs through the entry point of the loop: their files, and how they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from oneloop.checkpoint.store import Store, problems, step_of
from splits import distance
from worlds import CONFIGS, each_forked, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.store",
    "oneloop.launch.processes",
    "oneloop.loop.start_lines",
    "oneloop.loop.upkeep",
    "oneloop.optim.bad_step_policy",
    "oneloop.run.entry",
    "oneloop.run.folder",
    "oneloop.run.end",
    "oneloop.task_protocol.protocol",
    "oneloop.train",
)

RECIPE = (
    "task: tiny.Ragged\nbatch: {size: 8}\nduration: 30\nlog: {every: 10}\neval: {every: "
    "10}\ntrack: []\n"
)


@pytest.fixture
def recipe(tmp_path) -> str:
    (tmp_path / "tiny_run.yaml").write_text(RECIPE)
    return str(tmp_path / "tiny_run.yaml")


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """Return the folder of a finished run of the recipe, and its output; tests copy the folder."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny_run.yaml").write_text(RECIPE)
    world = run(train, ["tiny_run.yaml", "--track", "tensorboard"], folder=folder)
    world.ok()
    return folder / "runs" / "tiny_run", world.output  # runs/<recipe>


def test_what_lands_on_disk(finished):
    folder, output = finished
    names = {path.name for path in folder.iterdir()}
    assert {"recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "final"} <= names
    assert list(folder.rglob("events.out.tfevents*"))
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["batch"] == {
        "size": 8,
        "micro": None,
        "grain": None,
    }
    assert (
        json.loads((folder / "environment.json").read_text())["versions"]["torch"]
        in torch.__version__
    )
    ended = summary(folder)
    assert (ended["exit_reason"], ended["exit_code"], ended["step"], ended["samples"]) == (
        "done",
        0,
        30,
        240,
    )
    assert ended["tokens"] == lines(folder)[-1]["tokens"]
    assert ended["best"]["value"] == min(
        line["eval/loss"] for line in lines(folder) if "eval/loss" in line
    )
    assert [line["step"] for line in lines(folder) if "train/loss" in line] == [10, 20, 30]
    assert "batch 8 = 1 ranks x 1 micro-batches x 8; 30 steps" in output
    assert "step 30/30" in output


def test_a_resolved_recipe_repeats_the_run(tmp_path, recipe):
    run(train, [recipe, "--run.dir", "a", "--optimizer.betas", "[0.8, 0.9]"], folder=tmp_path).ok()
    run(train, ["a/recipe.yaml", "--run.dir", "b"], folder=tmp_path).ok()
    first, second = (load_file(tmp_path / one / "final" / "model.safetensors") for one in "ab")
    # the same layout: bit-identical
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_reports_it_and_another_recipe_is_rejected(tmp_path, recipe, finished):
    shutil.copytree(finished[0], tmp_path / "runs" / "tiny_run")
    commands = [
        (tmp_path, [recipe, "--batch.micro", "4", "--log.every", "5"]),
        (tmp_path, [recipe, "--optimizer.lr", "0.5"]),
    ]
    ((again, other),) = run(each_forked, commands).ok()
    assert again.code == 0 and "finished at step 30: nothing to do" in again.output
    assert other.code == 2 and "optimizer.lr: 0.001 -> 0.5" in other.output


def test_init_from_takes_the_weights_of_another_run(tmp_path, recipe, finished):
    words = [recipe, "--init.from", str(finished[0])]
    commands = [
        (tmp_path, [*words, "--optimizer.lr", "0", "--duration", "2", "--run.dir", "b"]),
        (tmp_path, [*words, "--task.width", "16", "--run.dir", "c"]),
    ]
    ((taken, wrong),) = run(each_forked, commands).ok()
    assert taken.code == 0, taken.output
    first, second = (
        load_file(folder / "final" / "model.safetensors")
        for folder in (finished[0], tmp_path / "b")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert wrong.code == 2 and "other shape" in wrong.output and not (tmp_path / "c").exists()


def test_overfit_trains_on_those_samples_only(tmp_path, recipe):
    run(
        train,
        [recipe, "--debug.overfit", "3"],
        folder=tmp_path,
        variables={"TINY_FOLDER": str(tmp_path)},
    ).ok()
    assert set((tmp_path / "drawn-0.txt").read_text().split()) == {"0", "1", "2"}


def test_dry_run_makes_one_step_and_one_evaluation(tmp_path, recipe):
    run(train, [recipe, "--debug.dry_run", "--schedule.warmup", "5"], folder=tmp_path).ok()
    ended = summary(tmp_path / "runs" / "tiny_run")
    assert ended["step"] == 1 and "eval/loss" in ended


@pytest.mark.parametrize(
    ("optimizer", "ranks", "config"),
    [
        ("adamw", 1, "single"),
        pytest.param("adamw", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("adamw", 2, "fsdp2", marks=pytest.mark.slow),
        pytest.param("torch.optim.RMSprop", 1, "single", marks=pytest.mark.slow),
        pytest.param("torch.optim.RMSprop", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("torch.optim.RMSprop", 2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_nan_ends_the_run_with_3(tmp_path, recipe, ranks, config, optimizer):
    world = run(
        train,
        [recipe, "--task.spoiled", "5", "--optimizer.name", optimizer],
        ranks=ranks,
        config=config,
        folder=tmp_path,
    )
    assert world.codes == [3] * ranks, world.output
    ended = summary(tmp_path / "runs" / "tiny_run")
    assert ended["exit_code"] == 3 and "the gradient is not finite" in ended["exit_reason"]
    assert not (tmp_path / "runs" / "tiny_run" / "final").exists()
    event = lines(tmp_path / "runs" / "tiny_run")[-1]
    assert event["event"] == "stop" and 5 in event["ids"] and len(event["ids"]) == 8
    assert f"step {event['step']}: " in ended["exit_reason"]
    sealed = Store(tmp_path / "runs" / "tiny_run" / "checkpoints").sealed()
    assert all(problems(path) == [] and step_of(path) < 30 for path in sealed)
    assert "Traceback" not in world.output


def test_early_stop_waits_for_its_patience(tmp_path, recipe):
    words = [recipe, "--eval.every", "1", "--stop.patience", "4", "--optimizer.lr", "0"]
    run(train, words, folder=tmp_path).ok()
    ended = summary(tmp_path / "runs" / "tiny_run")
    assert ended["step"] == 5  # the first evaluation was the best
    assert ended["exit_reason"].startswith("early stop") and ended["exit_code"] == 0


def test_plateau_lowers_the_rate(tmp_path, recipe):
    words = [
        recipe,
        "--eval.every",
        "1",
        "--log.every",
        "1",
        "--optimizer.lr",
        "1e-12",
        "--schedule.name",
        "plateau",
        "--schedule.patience",
        "3",
        "--schedule.factor",
        "0.5",
        "--duration",
        "9",
    ]
    run(train, words, folder=tmp_path).ok()
    rates = [
        line["train/lr"] for line in lines(tmp_path / "runs" / "tiny_run") if "train/lr" in line
    ]
    assert rates[0] == 1e-12 and min(rates) <= 0.5e-12


@pytest.mark.slow
def test_a_tasks_own_bug_states_where(tmp_path, recipe):
    (tmp_path / "mine.py").write_text(
        "from oneloop.task_protocol.protocol import Task\n"
        "class Bad(Task):\n    def __init__(self):\n        raise ValueError('no such file')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "oneloop.train", recipe, "--task", "mine.Bad"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2 and "mine.py:4" in ended.stderr and "no such file" in ended.stderr


def _trainers(parent: int) -> list[int]:
    import psutil

    children = psutil.Process(parent).children(recursive=True)
    return [
        child.pid
        for child in children
        if "oneloop.train" in " ".join(child.cmdline())
        and "accelerate" not in " ".join(child.cmdline())
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("single", "SIGTERM"),
        ("ddp", "SIGUSR1"),
        ("fsdp2", "SIGINT"),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, config, name):
    command = [
        sys.executable,
        "-m",
        "oneloop",
        "launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
        "digits",
        "--duration",
        "100000",
        "--run.dir",
        str(tmp_path / "run"),
        "--track",
        "none",
        "--log.every",
        "5",
    ]
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        began = time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert launcher.poll() is None and time.monotonic() - began < 90
            time.sleep(0.1)
        os.kill(_trainers(launcher.pid)[-1], getattr(signal, name))
        output, _ = launcher.communicate(timeout=120)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 75, output
    ended = summary(tmp_path / "run")
    assert ended["exit_code"] == 75 and ended["exit_reason"].startswith("stopped by")
    assert lines(tmp_path / "run")[-1]["step"] <= ended["step"] < 100000
    assert (
        sorted((tmp_path / "run" / "checkpoints").iterdir())[-1].name == f"step-{ended['step']:08d}"
    )
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_two_starters_on_one_folder(tmp_path):
    from oneloop.basics.exit_codes import BadInput
    from oneloop.run.folder import Folder

    first = Folder(tmp_path / "run")
    first.hold()
    (tmp_path / "run" / "recipe.yaml").write_text("{}")
    with pytest.raises(BadInput, match=f"in use by process {os.getpid()} on "):
        Folder(tmp_path / "run").inspect({})
    with pytest.raises(BadInput, match="in use by process"):
        Folder(tmp_path / "run").hold()
    first.close()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_bf16_trains_under_every_strategy(tmp_path, recipe, strategy):
    found = {}
    for ranks, config in ((1, "single"), (2, strategy)):
        world = run(
            train,
            [recipe, "--run.dir", config],
            ranks=ranks,
            config=config,
            folder=tmp_path,
            options=("--mixed_precision", "bf16"),
        )
        world.ok()
        found[config] = load_file(tmp_path / config / "final" / "model.safetensors")
        assert all(tensor.dtype == torch.float32 for tensor in found[config].values())
        assert "bf16 mixed precision" in world.output
    assert distance(found[strategy], found["single"]) < 0.02


@pytest.mark.slow
def test_hsdp_trains_the_same_weights_on_four_processes(tmp_path, recipe):
    run(train, [recipe, "--run.dir", "one", "--machine.dtype", "float64"], folder=tmp_path).ok()
    world = run(
        train,
        [recipe, "--run.dir", "four", "--machine.dtype", "float64"],
        ranks=4,
        config="hsdp",
        folder=tmp_path,
    )
    world.ok()
    one, four = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "four")
    )
    assert distance(four, one) < 1e-10


def test_dropout_and_batch_statistics_are_reported(tmp_path, recipe):
    world = run(train, [recipe, "--task.dropout", "0.1", "--debug.dry_run"], folder=tmp_path)
    assert "draw random numbers (dropout)" in world.output
    small = ["--task.model", "timm:test_resnet", "--task.image_size", "32"]
    words = ["digits", *small, "--debug.dry_run", "--batch.size", "4"]
    with_batch_norm = run(train, [*words, "--task.data", str(_pictures(tmp_path))], folder=tmp_path)
    with_batch_norm.ok()
    assert (
        "the model has BatchNorm, whose statistics depend on the micro-batch"
        in with_batch_norm.output
    )


def _pictures(folder: Path) -> Path:
    from PIL import Image

    for part in ("train", "validation"):
        for label in ("cat", "dog"):
            (folder / "pictures" / part / label).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (20, 24), (number * 60, 100, 200)).save(
                    folder / "pictures" / part / label / f"{number}.png"
                )
    return folder / "pictures"
