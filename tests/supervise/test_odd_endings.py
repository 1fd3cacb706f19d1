"""Runs that start or end in unusual ways."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from endings import LAUNCHERS, RECIPE, faulty, summary, supervisors
from worlds import CONFIGS, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.background_save",
    "oneloop.data.data_workers",
    "oneloop.launch.signals",
    "oneloop.run.entry",
    "oneloop.run.end",
    "oneloop.supervise.crash_report",
    "oneloop.supervise.supervisor",
)

TRAIN = [sys.executable, "-m", "oneloop.train", "f.yaml"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "f.yaml").write_text(RECIPE)
    return tmp_path


def started(folder: Path, *words: str, **more) -> subprocess.Popen:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **more.pop("variables", {})}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return subprocess.Popen([*TRAIN, *words], cwd=folder, env=variables, **given)


def until(true, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "expected_text"),
    [
        pytest.param("raise:CancelledError", "CancelledError: the fault", marks=pytest.mark.slow),
        ("raise:KeyboardInterrupt", "KeyboardInterrupt: the fault"),
        ("raise:Unspeakable", "Unspeakable: (its message cannot be printed: ValueError)"),
    ],
)
def test_whatever_is_raised_is_named(folder, fault, expected_text):
    words = ["--task.fault", fault, "--task.rank", "1", "--task.at", "15", "--duration", "40"]
    world = faulty(folder, *words, config="ddp", ranks=2)
    assert world.codes == [1, 1]
    assert summary(folder)["exit_reason"] == f"error: rank 1: {expected_text}", world.output


def test_an_exit_code_that_cannot_be_reported_is_kept(tmp_path):
    # Without a descriptor, or on a full disk, the launcher's file cannot be written.
    (tmp_path / "exit_code").mkdir()
    code = "from oneloop.launch.signals import leave; leave(2, main=True)"
    variables = {**os.environ, "ONELOOP_EXIT_FILE": str(tmp_path / "exit_code")}
    assert subprocess.run([sys.executable, "-c", code], env=variables).returncode == 2
    (tmp_path / "exit_code").rmdir()
    assert subprocess.run([sys.executable, "-c", code], env=variables).returncode == 0
    assert (tmp_path / "exit_code").read_text() == "2"


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_thread_that_stays_holds_nobody(folder, told):
    words = ["--task.fault", "thread:600", "--duration", "40"]
    with started(folder, *words, "--machine.patience", "1" if told else "0.03") as process:
        until(lambda: (folder / "run" / "summary.json").exists())
        family = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        if told:
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and "has finished but does not exit" in said
    assert summary(folder)["exit_reason"] == "done" and not psutil.wait_procs(family, 5)[1]


@pytest.mark.slow
def test_a_slow_exit_after_a_stop_is_left_alone(folder):
    words = ["--task.fault", "at_exit:4", "--task.at", "40", "--task.once", "once"]
    words += ["--task.pause", "0.02", "--duration", "20000", "--machine.patience", "0.25"]
    with started(folder, *words) as process:
        until((folder / "once").exists)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 75 and "does not exit" not in said, said


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
def test_a_folder_that_becomes_read_only_is_one_message(folder):
    script = """
        "$@" &
        until ls run/checkpoints/step-*; do sleep 0.1; done
        mount --bind run run && mount -o remount,bind,ro run
        wait $!
    """
    command = ["unshare", "--mount", "bash", "-c", script, "bash", *TRAIN, "--task.pause", "0.02"]
    more = {"capture_output": True, "text": True, "timeout": 90}
    done = subprocess.run([*command, "--duration", "20000"], cwd=folder, check=False, **more)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "SaveError: 4 saves in a row have failed" in done.stderr
    assert "Read-only file system" in done.stderr


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
def test_full_shared_memory_is_named(folder):
    """torch loses a batch that a worker cannot send, and waits for it."""
    (folder / "big.py").write_text(
        "import torch\n"
        "from faulty import Faulty\n"
        "class Big(Faulty):\n"
        "    def collate(self, samples):\n"
        "        return super().collate(samples) | {'big': torch.zeros(len(samples), 1 << 20)}\n"
    )
    script = 'mount -t tmpfs -o size=48m none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", script, "bash", *TRAIN[:-1], "big.py:Big"]
    words = ["--batch.size", "8", "--machine.workers", "2", "--duration", "9", "--run.dir", "run"]
    more = {"capture_output": True, "text": True, "timeout": 90}
    done = subprocess.run([*command, *words], cwd=folder, check=False, **more)
    assert done.returncode == 1, done.stderr
    assert "shared memory (/dev/shm) is full" in summary(folder)["exit_reason"]


def test_an_exit_without_a_word_is_an_error_whatever_its_code(folder):
    world = faulty(folder, "--task.fault", "os_exit:0", "--task.where", "init", "--task.at", "0")
    assert world.codes == [1] and "exited with code 0 and no error message" in world.output
    assert not (folder / "run").exists()


def test_a_signal_to_the_trainer_alone_in_its_imports(folder):
    with started(folder) as process:
        until(lambda: psutil.Process(process.pid).children())
        psutil.Process(process.pid).children()[0].send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 75 and "stopped by SIGTERM before the run started" in said, said
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_nobody_reads(folder):
    """``oneloop train f.yaml | head -1``: the run continues when its output is closed."""
    reading, writing = os.pipe()
    with started(folder, "--duration", "60", stdout=writing) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-"])
def test_without_standard_streams(folder, closed):
    line = f"exec {' '.join(TRAIN)} --duration 20 {closed}"
    assert subprocess.run(["sh", "-c", line], cwd=folder, timeout=120, check=False).returncode == 0
    assert summary(folder)["exit_reason"] == "done"


@pytest.mark.slow
def test_variables_that_others_have_left(folder):
    """A rank without a world size, and an exit-code file whose folder is gone."""
    left = {"RANK": "1", "ONELOOP_EXIT_FILE": str(folder / "gone" / "exit_code")}
    with started(folder, "--duration", "many", variables=left) as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "duration" in said and "Traceback" not in said, said
    with started(folder, "--duration", "20", variables=left) as process:
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and summary(folder)["exit_reason"] == "done", said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_watching_process_is_killed(folder, rank):
    command = [
        *LAUNCHERS["oneloop"],
        "--config_file",
        str(CONFIGS / "ddp.yaml"),
        "f.yaml",
        "--task.pause",
        "0.02",
    ]
    process = subprocess.Popen(
        [*command, "--duration", "20000"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    until(lambda: (folder / "run" / "checkpoints" / "step-00000010").exists())
    family = psutil.Process(process.pid).children(recursive=True)
    watching = {one.environ()["RANK"]: one for one in supervisors(process.pid)}
    watching[str(rank)].kill()
    assert process.wait(120) == 1
    assert not psutil.wait_procs(family, 15)[1]
    assert f"rank {rank} and its supervisor process were killed" in summary(folder)["exit_reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("group", [False, True])
def test_a_long_step_under_the_launcher_is_saved(folder, name, group):
    """The step takes more than the ten seconds that a process gets when its launcher is gone."""
    command = [
        *LAUNCHERS["oneloop"],
        "--config_file",
        str(CONFIGS / "single.yaml"),
        "f.yaml",
        "--task.pause",
        "7",
    ]
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    until(lambda: (folder / "run" / "metrics.jsonl").exists())
    family = psutil.Process(process.pid).children(recursive=True)
    time.sleep(8)
    (os.killpg if group else os.kill)(process.pid, getattr(signal, name))
    assert process.wait(120) == 75
    assert not psutil.wait_procs(family, 5)[1]
    assert summary(folder)["exit_code"] == 75 and summary(folder)["step"] >= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_a_library_turns_into_its_own_error(ranks, tmp_path):
    (tmp_path / "wraps.py").write_text(
        "import os, signal, time\n"
        "from oneloop.tasks.image_classification import ImageClassification\n"
        "class Wraps(ImageClassification):\n"
        "    def model(self):\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            time.sleep(1)\n"
        "        except BaseException as error:\n"
        "            raise RuntimeError('of a library') from error\n"
    )
    world = run(
        train,
        ["wraps.py:Wraps", "--task.width", "8", "--run.dir", "run"],
        ranks=ranks,
        folder=tmp_path,
    )
    assert (
        world.codes == [75] * ranks and "stopped by SIGTERM before the run started" in world.output
    ), world.output
    assert not (tmp_path / "run").exists()
