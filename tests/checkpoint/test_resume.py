"""Promises 4 and 5: a resumed run is bit-identical to an uninterrupted one, and can resume on any
number of ranks."""

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
from safetensors.torch import load_file

from oneloop.checkpoint.manifest import MANIFEST, signed
from oneloop.checkpoint.store import Store, problems
from splits import distance, furthest
from sync_saves import write_in_the_trainer
from worlds import CONFIGS, HERE, Ended, back_to, each_forked, run, timeless_log, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.background_save",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.resume",
    "oneloop.checkpoint.store",
    "oneloop.loop.training_state",
    "oneloop.train",
)

RECIPE = """
task: {name: tiny.Ragged, dropout: 0.1}
batch: {size: 8}
duration: 30
log: {every: 3}
eval: {every: 7}
save: {every: 5, keep: 99}
schedule: {name: cosine, warmup: 4}
ema: {half_life: 20 samples, power: [0.1]}
guard: {nonfinite: skip, sigma: 50}
track: []
"""


@pytest.fixture
def recipe(tmp_path) -> str:
    (tmp_path / "tiny_run.yaml").write_text(RECIPE)
    return str(tmp_path / "tiny_run.yaml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run of the recipe on one process; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny_run.yaml").write_text(RECIPE)
    run(train, [str(folder / "tiny_run.yaml"), "--run.dir", "run"], folder=folder).ok()
    return folder / "run"


def in_turn(folder: Path, *commands: list[str]) -> list[Ended]:
    """Run these commands in a folder, one after another, in processes of one world."""
    return run(each_forked, [(folder, words) for words in commands], folder=folder).ok()[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def cut(folder: Path, copy: Path, step: int) -> None:
    """Copy a run as it was when killed some time after the checkpoint of ``step``."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "final")
    (copy / "summary.json").unlink()
    for path in Store(copy / "checkpoints").sealed():
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 29, "train/lo')  # the unfinished line


def same(one: Path, other: Path) -> None:
    assert timeless_log(one) == timeless_log(other)
    for file in (one / "final").glob("*.safetensors"):  # with the EMA weights
        assert file.read_bytes() == (other / "final" / file.name).read_bytes()
    ends = [Store(path / "checkpoints").sealed()[-1] for path in (one, other)]
    assert ends[0].name == ends[1].name
    for file in ends[0].glob("*.safetensors"):  # with the optimizer state
        assert file.read_bytes() == (ends[1] / file.name).read_bytes()


# 37 samples in batches of 8: no epoch ends with a step here. Steps 2 and 14 are in mid-epoch, 14 in
# the fourth epoch.
@pytest.mark.parametrize(
    ("optimizer", "ranks", "config"),
    [
        pytest.param("adamw", 1, "single", marks=pytest.mark.slow),
        pytest.param("adamw", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("adamw", 2, "fsdp2", marks=pytest.mark.slow),
        ("muon", 1, "single"),
        *(pytest.param("muon", 2, config, marks=pytest.mark.slow) for config in ("ddp", "fsdp2")),
    ],
)
def test_a_resumed_run_is_the_run_left_alone(tmp_path, recipe, ranks, config, optimizer):
    words = [recipe, "--optimizer.name", optimizer, "--batch.micro", "2"]
    words += ["--duration", "20", "--save.every", "2"]
    run(train, [*words, "--run.dir", "alone"], ranks=ranks, config=config, folder=tmp_path).ok()
    for step in (2, 14) if ranks == 1 else (14,):
        cut(tmp_path / "alone", tmp_path / str(step), step)
        world = run(
            train, [*words, "--run.dir", str(step)], ranks=ranks, config=config, folder=tmp_path
        )
        world.ok()
        assert f"resuming from {step}/checkpoints/step-{step:08d}" in world.output
        same(tmp_path / "alone", tmp_path / str(step))


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_augmentation_and_dropout_come_back_at_every_kind_of_position(tmp_path, workers):
    # 48 samples in batches of 16: step 6 ends epoch 2 exactly, 4 is in mid-epoch, 10 is in the
    # middle of the fourth epoch.
    words = [
        "digits",
        "--debug.overfit",
        "48",
        "--batch.size",
        "16",
        "--duration",
        "12",
        "--save.every",
        "2",
        "--save.keep",
        "99",
        "--log.every",
        "1",
        "--eval.every",
        "5",
        "--task.width",
        "8",
        "--task.dropout",
        "0.2",
        "--machine.workers",
        workers,
        "--track",
        "none",
        "--ema.half_life",
        "2ep",
    ]
    run(train, [*words, "--run.dir", "alone"], folder=tmp_path).ok()
    steps = (6, 10) if workers == "0" else (4,)  # workers start slowly
    for step in steps:
        cut(tmp_path / "alone", tmp_path / str(step), step)
    resumed = in_turn(tmp_path, *([*words, "--run.dir", str(step)] for step in steps))
    for step, ended in zip(steps, resumed, strict=True):
        assert ended.code == 0, ended.output
        same(tmp_path / "alone", tmp_path / str(step))


@pytest.mark.slow
def test_elastic_worlds_see_the_same_samples_and_losses(tmp_path, recipe):
    ids = {}
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-5)):
        words = [
            recipe,
            "--machine.check_every",  # a repeated micro-batch would be recorded, too
            "0",
            "--task.dropout",
            "0",
            "--machine.dtype",
            dtype,
            "--log.every",
            "1",
            "--save.every",
            "1",
            "--duration",
            "40",
        ]
        alone = tmp_path / dtype
        alone.mkdir()
        run(
            train,
            [*words, "--run.dir", str(alone / "run")],
            folder=tmp_path,
            variables={"TINY_FOLDER": str(alone)},
        ).ok()
        elastic = tmp_path / f"{dtype}-elastic"
        elastic.mkdir()
        legs = [
            (2, "ddp", 9),
            (1, "single", 16),
            (4, "ddp", 22),
            (2, "fsdp2", 31),
            (1, "single", 40),
        ]
        by_step = {}
        for number, (ranks, config, until) in enumerate(legs):
            here = elastic / str(number)
            here.mkdir()
            world = run(
                train,
                [*words, "--run.dir", str(elastic / "run")],
                ranks=ranks,
                config=config,
                folder=tmp_path,
                variables={"TINY_FOLDER": str(here)},
            )
            world.ok()
            first = 0 if number == 0 else legs[number - 1][2]
            by_step |= steps_of(here, ranks, first)
            if until < 40:
                back_to(elastic / "run", until)
        ids[dtype] = by_step
        expected = steps_of(alone, 1, 0)
        assert all(sorted(by_step[step]) == sorted(expected[step]) for step in range(40))
        losses = [
            [line["train/loss"] for line in timeless_log(one / "run") if "train/loss" in line]
            for one in (alone, elastic)
        ]
        assert len(losses[0]) == 40 and furthest(losses[1], losses[0]) < bound
        assert distance(weights(elastic / "run"), weights(alone / "run")) < bound


def steps_of(folder: Path, ranks: int, first: int) -> dict[int, list[int]]:
    from tiny import drawn

    share = 8 // ranks
    by_rank = [drawn(folder, rank, micro=share) for rank in range(ranks)]
    count = min(len(one) for one in by_rank) // share
    return {
        first + n: [i for one in by_rank for i in one[n * share : (n + 1) * share]]
        for n in range(count)
    }


def test_a_damaged_checkpoint_is_reported_and_passed_over(tmp_path, recipe, finished):
    cut(finished, tmp_path / "hurt", 20)
    file = tmp_path / "hurt" / "checkpoints" / "step-00000020" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    world = run(train, [recipe, "--run.dir", "hurt"], folder=tmp_path)
    world.ok()
    assert (
        "rank-00000.safetensors: expected checksum" in world.output
        and "resuming from" in world.output
    )
    assert (
        "step-00000015" in world.output
        and (tmp_path / "hurt" / "checkpoints" / "bad-step-00000020").is_dir()
    )
    same(finished, tmp_path / "hurt")


def test_where_none_is_good_nothing_is_started_afresh(tmp_path, recipe):
    run(
        train,
        [recipe, "--save.every", "0", "--run.dir", "hurt", "--save.best", "false"],
        folder=tmp_path,
    ).ok()
    back_to(tmp_path / "hurt", 30)
    (only,) = Store(tmp_path / "hurt" / "checkpoints").sealed()
    (only / "state.json").write_text("{}")
    world = run(train, [recipe, "--run.dir", "hurt"], ranks=2, folder=tmp_path)
    assert world.codes == [2, 2] and "no good one is left" in world.output
    assert only.exists()

    # A folder of an earlier version is rejected, too.
    manifest = json.loads((only / MANIFEST).read_text())
    del manifest["self"]
    (only / MANIFEST).write_bytes(signed({**manifest, "format": 2}))
    world = run(train, [recipe, "--run.dir", "hurt"], folder=tmp_path)
    assert world.codes == [2] and "has format 2; this oneloop reads format 3" in world.output
    assert only.exists()


def test_what_may_change_and_what_not(tmp_path, recipe, finished):
    shutil.copytree(finished, tmp_path / "a")
    words = [recipe, "--run.dir", "a"]
    endless = [recipe, "--run.dir", "b", "--schedule.name", "constant", "--schedule.warmup", "2"]
    endless += ["--save.every", "10"]
    again, changed, longer, accepted, never, first, second = in_turn(
        tmp_path,
        [*words, "--batch.micro", "4", "--log.every", "5"],
        [*words, "--optimizer.lr", "0.5"],
        [*words, "--duration", "33"],
        [*words, "--duration", "33", "--optimizer.weight_decay", "0.5", "--run.accept_changes"],
        [*words, "--run.resume", "never"],
        endless,
        [*endless, "--duration", "40"],
    )
    assert again.code == 0 and "finished at step 30: nothing to do" in again.output
    assert changed.code == 2 and "optimizer.lr: 0.001 -> 0.5" in changed.output
    # its cosine would end elsewhere
    assert longer.code == 2 and "duration: 30 -> 33" in longer.output
    # Two parameter groups in place of one: all their entries come from the recipe.
    assert accepted.code == 0, accepted.output
    assert "accepted: optimizer.weight_decay: 0.0 -> 0.5" in accepted.output
    assert "resuming from a/checkpoints/step-00000030" in accepted.output
    assert never.code == 2 and "run.resume is never" in never.output
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert timeless_log(tmp_path / "b")[-1]["step"] == 40


def test_state_among_the_settings_of_an_optimizer_continues_and_the_settings_do_not(
    tmp_path, recipe
):
    words = [recipe, "--optimizer.name", "odd_optimizers.GrowingDefault", "--optimizer.lr", "0.05"]
    words += [
        "--optimizer.weight_decay",
        "0.1",
        "--duration",
        "14",
        "--save.every",
        "2",
        "--run.dir",
    ]
    run(train, [*words, "alone"], folder=tmp_path).ok()
    for copy in ("same", "decay"):
        cut(tmp_path / "alone", tmp_path / copy, 6)
    decayed = [*words, "decay", "--optimizer.weight_decay", "0.5", "--run.accept_changes"]
    other = [*words, "other", "--optimizer.name", "adamw", "--run.accept_changes"]
    cut(tmp_path / "alone", tmp_path / "other", 6)
    again, changed, rejected = in_turn(tmp_path, [*words, "same"], decayed, other)
    assert (again.code, changed.code) == (0, 0), again.output + changed.output
    assert rejected.code == 2 and "has the state of GrowingDefault " in rejected.output
    same(tmp_path / "alone", tmp_path / "same")

    # Another weight decay takes effect, and the optimizer's own state is that of the run.
    groups = []
    for name in ("alone", "decay"):
        state = Store(tmp_path / name / "checkpoints").sealed()[-1] / "state.json"
        groups.append(json.loads(state.read_text())["optimizer"]["groups"])
    assert groups[0] == groups[1] and all(group.keys() == {"d"} for group in groups[0])
    ends = [weights(tmp_path / name) for name in ("alone", "decay")]
    assert any((ends[0][name] - ends[1][name]).abs().max() > 1e-3 for name in ends[0])


def test_a_checkpoints_path_starts_another_run(tmp_path, recipe, finished):
    for copy in ("a", "late"):
        shutil.copytree(finished, tmp_path / copy)
    back_to(tmp_path / "late", 25)
    path = "checkpoints/step-00000020"
    begun, rejected, missing = in_turn(
        tmp_path,
        [recipe, "--run.dir", "b", "--run.resume", f"a/{path}"],
        [recipe, "--run.dir", "late", "--run.resume", f"late/{path}"],
        [recipe, "--run.dir", "c", "--run.resume", "nowhere"],
    )
    assert begun.code == 0, begun.output
    assert all(
        torch.equal(x, y)
        for x, y in zip(weights(tmp_path / "a").values(), weights(tmp_path / "b").values())
    )
    assert rejected.code == 2 and "step-00000025, which would be lost" in rejected.output
    assert missing.code == 2 and "nowhere" in missing.output


def test_a_stop_file_and_a_time_limit_stop_and_the_next_start_continues(tmp_path, recipe):
    words = [recipe, "--task.dropout", "0", "--duration", "60", "--eval.every", "0"]
    words += ["--save.every", "0", "--save.best", "false"]
    run(train, [*words, "--run.dir", "alone"], folder=tmp_path).ok()
    stopped = run(
        train, [*words, "--run.dir", "a", "--stop.after", "0.1s"], ranks=2, folder=tmp_path
    )
    assert stopped.codes == [75, 75], stopped.output
    ended = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert ended["exit_code"] == 75 and "stop.after" in ended["exit_reason"] and ended["step"] < 60
    (tmp_path / "a" / "STOP").touch()
    again = run(train, [*words, "--run.dir", "a"], ranks=2, folder=tmp_path)
    assert again.codes == [75, 75] and not (tmp_path / "a" / "STOP").exists()
    run(train, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    assert distance(weights(tmp_path / "a"), weights(tmp_path / "alone")) < 1e-4
    steps, expected = (
        [line["step"] for line in timeless_log(tmp_path / name) if "train/loss" in line]
        for name in ("a", "alone")
    )
    assert steps == expected


def _stopped_in_an_evaluation(words: list[str], number: int) -> None:
    """Train; SIGTERM arrives in the forward of this number in eval mode."""
    import tiny

    loss = tiny.Ragged.loss
    forwards = 0

    def counted(task, model, batch):
        nonlocal forwards
        forwards += not model.training
        if forwards == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(task, model, batch)

    tiny.Ragged.loss = counted
    train(words)


def test_a_stop_in_an_evaluation_repeats_it(tmp_path, recipe):
    words = [recipe, "--task.held_out", "40", "--eval.micro", "1", "--eval.every", "15"]
    run(train, [*words, "--run.dir", "alone"], folder=tmp_path).ok()
    expected = timeless_log(tmp_path / "alone")
    for number in (20, 36):  # of 40 forwards with the weights, after those of the preflight check
        given = [*words, "--run.dir", "a"]
        world = run(_stopped_in_an_evaluation, given, number, folder=tmp_path)
        assert world.codes == [75], world.output
        assert json.loads((tmp_path / "a" / "summary.json").read_text())["step"] == 15
        assert not [line for line in timeless_log(tmp_path / "a") if "eval/loss" in line]
    assert any("eval/loss" in line and line["step"] == 15 for line in expected)
    run(train, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    assert timeless_log(tmp_path / "a") == expected


def test_failing_saves_are_borne_and_too_many_are_not(tmp_path, recipe, finished):
    world = run(
        _on_a_small_disk,
        [recipe, "--run.dir", "a", "--save.every", "1"],
        100,
        folder=tmp_path,
    )
    assert world.codes == [1] and world.output.count("SAVE FAILED") == 3
    assert (
        "saves in a row have failed"
        in json.loads((tmp_path / "a" / "summary.json").read_text())["exit_reason"]
    )
    sealed = Store(tmp_path / "a" / "checkpoints").sealed()
    # earlier checkpoints stayed intact
    assert sealed and all(problems(path) == [] for path in sealed)
    run(train, [recipe, "--run.dir", "a"], folder=tmp_path).ok()
    same(finished, tmp_path / "a")


def _on_a_small_disk(words: list[str], least: int) -> None:
    """Train with a limit of ``least`` bytes per file for the writer, from the sixth save on."""
    import resource

    from oneloop.checkpoint import checkpoints

    save = checkpoints.Checkpoints.save

    def limited(self, step, *args, **kwargs):
        if step == 6:
            resource.prlimit(self._process._process.pid, resource.RLIMIT_FSIZE, (least, least))
        return save(self, step, *args, **kwargs)

    checkpoints.Checkpoints.save = limited
    train(words)


def test_a_pickle_in_place_of_any_file_is_never_run(tmp_path, recipe):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    run(train, [recipe, "--run.dir", "alone", "--save.keep", "1"], folder=tmp_path).ok()
    cut(tmp_path / "alone", tmp_path / "cut", 30)
    files = [
        path.relative_to(tmp_path / "cut")
        for path in (tmp_path / "cut").rglob("*")
        if path.is_file()
    ]
    assert len(files) > 5
    for number, file in enumerate(files):
        hurt = tmp_path / f"hurt{number}"
        shutil.copytree(tmp_path / "cut", hurt)
        (hurt / file).write_bytes(pickle.dumps(Bomb()))
    commands = [[recipe, "--run.dir", f"hurt{n}", "--save.keep", "1"] for n in range(len(files))]
    for file, ended in zip(files, in_turn(tmp_path, *commands), strict=True):
        assert "Traceback" not in ended.output, ended.output
        assert ended.code == (2 if "checkpoints" in file.parts else 0), (file, ended.output)
        assert tmp_path / "boom" not in ended.changed, file


def audited(words: list[str]) -> None:
    def hook(event: str, arguments) -> None:
        if event.startswith("pickle.find_class"):
            os.write(2, f"UNPICKLED {arguments}\n".encode())

    sys.addaudithook(hook)
    write_in_the_trainer()
    train(words)


def test_nothing_is_unpickled_in_save_and_resume(tmp_path, recipe):
    words = [recipe, "--run.dir", "a", "--machine.workers", "0"]
    words += ["--save.every", "10"]
    first = run(audited, words, folder=tmp_path)
    first.ok()
    back_to(tmp_path / "a", 20)
    second = run(audited, words, folder=tmp_path)
    second.ok()
    assert "resuming from" in second.output and "UNPICKLED" not in first.output + second.output


@pytest.mark.slow
def test_the_launchers_death_ends_the_trainers(tmp_path):
    import psutil

    command = [
        sys.executable,
        "-m",
        "oneloop",
        "launch",
        "--config_file",
        str(CONFIGS / "ddp.yaml"),
        "digits",
        "--duration",
        "100000",
        "--run.dir",
        str(tmp_path / "run"),
        "--track",
        "none",
    ]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert launcher.poll() is None and time.monotonic() - began < 90
        time.sleep(0.1)
    everyone = psutil.Process(launcher.pid).children(recursive=True)
    assert len(everyone) >= 3
    rejected = subprocess.run(
        [*command[:2], "oneloop.train", *command[6:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # the first run is undisturbed
    assert rejected.returncode == 2 and "is in use by process" in rejected.stderr
    assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(everyone, timeout=120)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single", "ddp"])
def test_chaos(config):
    from chaos import WORDS, chaos

    made = subprocess.run(
        [
            sys.executable,
            str(HERE / "chaos.py"),
            "--kills",
            "5",
            "--config_file",
            f"accelerate_configs/{config}.yaml",
            *WORDS,
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert chaos and made.returncode == 0 and "5 of 5 kills resumed" in made.stdout, (
        made.stdout + made.stderr
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2"])
def test_a_hundred_kills(config):
    made = subprocess.run(
        [
            sys.executable,
            str(HERE / "chaos.py"),
            "--kills",
            "100",
            "--config_file",
            f"accelerate_configs/{config}.yaml",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0 and "100 of 100 kills resumed" in made.stdout, (
        made.stdout[-3000:] + made.stderr[-3000:]
    )
