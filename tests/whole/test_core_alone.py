"""The core trains without packaged tasks and tools: it saves, stops and resumes as a whole oneloop.

Each run is a command in a folder with a copy of oneloop and a small task.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import worlds
from core_copies import LAUNCHERS, copied, line_command, train, variables
from worlds import HERE

pytestmark = pytest.mark.covers(
    "oneloop.basics.houses",
    "oneloop.train",
    "oneloop.loop.steps",
    "oneloop.loop.training_state",
    "oneloop.launch.signals",
)

WORDS = ["--duration", "90", "--batch.size", "16", "--optimizer.lr", "0.01", "--track", "none"]
WORDS += ["--save.every", "10", "--eval.every", "30", "--log.every", "10", "--ema.half_life", "160"]
PAUSE = 0.03  # seconds of a micro-batch
# accelerate's launcher, which is torchrun's, turns each exit code into 1.
STOPPED = {"single": 75, "ddp with accelerate": 1, "ddp with oneloop": 75}


@pytest.fixture
def core(tmp_path) -> Path:
    copied(tmp_path, "tools", "tasks")
    return tmp_path


@contextmanager
def until_step(folder: Path, step: int, launcher: str) -> Iterator[subprocess.Popen[bytes]]:
    """Train; yield the process of the command as soon as there is a checkpoint of this step, or of
    a later one. At the end, wait for the process."""
    command = line_command(launcher, WORDS)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables(folder, PAUSE), stdout=output, stderr=output
        )
        late = time.monotonic() + 120
        try:
            while not any(newest >= step for newest in steps_saved(folder)):
                assert process.poll() is None, (folder / "output").read_text()
                assert time.monotonic() < late, (folder / "output").read_text()
                time.sleep(0.02)
            yield process
            process.wait(120)
        finally:
            process.kill()  # has ended, unless the test fails


def steps_saved(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in folder.glob("run/checkpoints/step-" + "[0-9]" * 8)]


def trainers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the training processes: each is a child of its supervisor, with the same command."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    ranks = []
    for one in family:
        words = one.cmdline()
        if "oneloop.train" in words and not any(word.endswith("launch") for word in words):
            ranks.append(one)
    supervisors = {one.pid for one in ranks}
    return [one for one in ranks if one.ppid() in supervisors]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def results(folder: Path) -> dict[str, Any]:
    """Return what a run leaves: its final weights and EMA weights, and their metrics."""
    ended = summary(folder)
    assert ended["exit_reason"] == "done"
    assert ended["step"] == 90
    found = {name: value for name, value in ended.items() if "eval/" in name}
    found["best"] = ended["best"]
    for file in ("model.safetensors", "ema.safetensors"):
        found[file] = (folder / "run" / "final" / file).read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_and_a_stopped_run_resume_to_the_same_bits(core, launcher):
    # The undisturbed run: of one process, by the whole oneloop.
    if launcher == "single":
        words = ["line.py:Line", "--run.dir", "run", *WORDS]
        worlds.run(worlds.train, words, folder=core).ok()
    else:
        done = train(core, *WORDS, launcher=launcher)
        assert done.returncode == 0, done.stderr
    expected = results(core)
    assert {"eval/loss", "ema/eval/loss"} <= expected.keys()
    (core / "run").rename(core / "undisturbed")

    # Kill one of two training processes.
    if launcher != "single":
        with until_step(core, 10, launcher) as process:
            training = trainers(process)
            assert len(training) == 2
            os.kill(training[-1].pid, signal.SIGKILL)
        assert process.returncode == 1
        assert "was killed by SIGKILL" in summary(core)["exit_reason"]
        assert max(steps_saved(core)) < 50

    # Stop the run, which two processes have resumed.
    with until_step(core, 50, launcher) as process:
        process.terminate()
    output = (core / "output").read_text()
    assert ("resuming from" in output) == (launcher != "single")
    assert process.returncode == STOPPED[launcher], output
    stopped = summary(core)
    assert stopped["exit_code"] == 75
    assert stopped["step"] < 90
    assert max(steps_saved(core)) == stopped["step"]

    # Train to the end.
    done = train(core, *WORDS, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert f"resuming from run/checkpoints/step-{stopped['step']:08d}" in done.stdout + done.stderr
    assert results(core) == expected


@pytest.mark.slow
def test_a_run_needs_no_tool(tmp_path):
    copied(tmp_path)
    script = HERE / "one_tool_less.py"
    environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    tools = {path.name for path in (tmp_path / "oneloop" / "tools").iterdir()}
    assert ended.keys() == tools - {"__init__.py", "__pycache__"}

    # Each run ends well, and names what it does without.
    for tool, (code, output) in ended.items():
        assert code == 0, (tool, output)
        assert (tmp_path / f"run-{tool}" / "final" / "model.safetensors").is_file()
        assert (tmp_path / f"run-{tool}" / "report.html").exists() == (
            tool not in ("report", "run_reader.py")
        )
        named = {"graph.py", "report", "run_reader.py"}
        assert ("is not in this copy of oneloop" in output) == (tool in named), (tool, output)
