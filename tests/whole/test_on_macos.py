"""oneloop under an emulation of macOS: helpers/macos/sitecustomize.py patches what oneloop's files
see, in every process. Weights must equal those without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fake_cases import words
from lab import gone
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.system",
    "oneloop.basics.system.memory",
    "oneloop.basics.system.processes",
    "oneloop.basics.system.signals",
    "oneloop.basics.system.start_methods",
    "oneloop.checkpoint.writer",
    "oneloop.data.data_workers",
    "oneloop.recipe.class_paths",
)

EMULATION = ROOT / "tests" / "helpers" / "macos"
SOURCE = ROOT / "src"
TASK = """
import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        values = torch.randn(8, generator=drawn)
        return values + torch.rand(()), (values.sum() > 0).long()


class MyTask:
    def model(self):
        return nn.Linear(8, 2)

    def train_set(self):
        return Data(256)

    def eval_sets(self):
        return {"validation": Data(64)}

    def collate(self, samples):
        values, targets = zip(*samples)
        return {"x": torch.stack(values), "y": torch.stack(targets)}

    def weight(self, batch):
        return torch.tensor(len(batch["y"]))

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), {}


class Local(MyTask):
    def train_set(self):
        class Own(Data):
            pass

        return Own(256)


class Tensors(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = list(torch.randn(count, 8, generator=torch.Generator().manual_seed(0)))
        self.rows = [row.clone() for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], (self.rows[index].sum() > 0).long()


class ManyTensors(MyTask):
    def train_set(self):
        return Tensors(1000)


class WithLambda(MyTask):
    def __init__(self):
        self.double = lambda value: 2 * value
"""


def environment(folder: Path, *, macos: bool) -> dict[str, str]:
    """Return the variables of a process, under the emulation or not; each has its own caches."""
    paths = [str(SOURCE)]
    if macos:
        paths.insert(0, str(EMULATION))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ONELOOP_CACHE": str(folder / f"cache-{macos}"),
        "ONELOOP_EMULATION_LOG": str(folder / "log"),
        "OMP_NUM_THREADS": "1",  # as in the worlds with whose weights these are compared
    }


def command(folder: Path, *given: str, macos: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the ``oneloop`` command in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "oneloop", *given],
        cwd=folder,
        env=environment(folder, macos=macos),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def launched(folder: Path, *given: str, config: str = "single"):
    """Start ``oneloop launch`` in a folder, under the emulation."""
    start = ["-m", "oneloop", "launch", "--config_file", config]
    return subprocess.Popen(
        [sys.executable, *start, *given, "--run.dir", "emulated", "--track", "none"],
        cwd=folder,
        env=environment(folder, macos=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def script(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run script.py of a folder under the emulation."""
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(folder, macos=True),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def seen_until_the_end(process: subprocess.Popen[str]) -> tuple[dict[int, str], str]:
    """Wait for a process; return the commands of its Python children by id, and its output.

    Only children that were seen twice count: a new one may not have started Python yet.
    """
    seen: dict[int, str] = {}
    before: set[int] = set()
    while process.poll() is None:
        now = set()
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.Error:
                continue
            if "python" in line.split(" ")[0]:
                now.add(child.pid)
                if child.pid in before:
                    seen[child.pid] = line
        before = now
        time.sleep(0.2)
    return seen, process.communicate()[0]


def trained(folder: Path, *given: str, config: str = "single", children: tuple[str, ...] = ()):
    """Train with and without the emulation.

    The weights must be equal. The children must be there, and all of them under the emulation.
    """
    seen, output = seen_until_the_end(launched(folder, *given, config=config))
    assert "done; results in" in output, output
    log = (folder / "log").read_text()
    for child in ("oneloop.train", "oneloop.checkpoint.writer", *children):
        assert child in log, log
    assert len(seen) > 1
    emulated = {int(line.split()[0]) for line in log.splitlines()}
    assert {pid: line for pid, line in seen.items() if pid not in emulated} == {}
    plain(folder, *given, config=config)


def plain(folder: Path, *given: str, config: str = "single") -> None:
    """Train without the emulation, in a world; the weights must be those with it."""
    (folder / "log").unlink()
    run(
        train,
        [*given, "--run.dir", "plain", "--track", "none"],
        ranks=1 if config == "single" else 2,
        config=config,
        variables={"ONELOOP_CACHE": environment(folder, macos=False)["ONELOOP_CACHE"]},
        timeout=280,
        folder=folder,
    ).ok()
    assert not (folder / "log").exists()
    emulated, own = (folder / name / "final/model.safetensors" for name in ("emulated", "plain"))
    assert emulated.read_bytes() == own.read_bytes()


@pytest.fixture
def task(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


SPAWNED = "multiprocessing.spawn"
SHORT = ("--duration", "6", "--batch.size", "32")
NO_EVALUATION = ("--eval.every", "0", "--save.best", "false")


def test_the_emulation_hides_what_macos_lacks(tmp_path):
    code = (
        "import os, sys, ctypes; from pathlib import Path\n"
        "found = [hasattr(os, 'sched_getaffinity'), hasattr(os, 'fork'), sys.platform,\n"
        "    hasattr(ctypes.CDLL(None), 'prctl'), hasattr(ctypes.CDLL(None), 'getpid')]\n"
        "try: Path('/proc/self/stat').read_text()\n"
        "except FileNotFoundError: found.append('no kernel files')\n"
        "print(found)"
    )
    program = f"exec({code!r}, {{'__name__': 'oneloop.test'}}); exec({code!r}, {{'__name__': 'x'}})"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path, macos=True),
        capture_output=True,
        text=True,
        check=True,
    )
    emulated, others = found.stdout.splitlines()
    assert emulated == "[False, False, 'darwin', False, True, 'no kernel files']"
    assert others == "[True, True, 'linux', True, True]"


def test_a_task_trains(task):
    trained(task, "my_task.py:MyTask", *SHORT, *NO_EVALUATION)


@pytest.mark.slow
def test_a_task_trains_with_a_spawned_data_worker(task):
    trained(
        task,
        *("my_task.py:MyTask", *SHORT, *NO_EVALUATION, "--machine.workers", "1"),
        children=(SPAWNED,),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "limit"), [("file_system", "256"), ("file_descriptor", "4096")])
def test_a_data_set_of_1000_tensors(task, monkeypatch, shares, limit):
    # If torch shares each by a file, as on Linux, more than 1,024 are open. (Not on macOS.)
    monkeypatch.setenv("ONELOOP_EMULATION_SHARES", shares)
    monkeypatch.setenv("ONELOOP_EMULATION_FILES", limit)
    given = ["my_task.py:ManyTensors", *SHORT, *NO_EVALUATION, "--machine.workers", "2"]
    trained(task, *given, children=(SPAWNED,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "named"), [("Local", "Own"), ("WithLambda", "lambda")])
def test_a_task_that_cannot_be_sent_gets_a_message(task, name, named):
    start = ["launch", "--config_file", "single", f"my_task.py:{name}", *SHORT, "--run.dir", "run"]
    found = command(task, *start, "--machine.workers", "1")
    assert found.returncode == 2
    message = found.stderr.splitlines()[-1]
    assert message.startswith("oneloop: the task or its data cannot be sent to data workers: ")
    assert named in message
    assert "machine.workers 0" in message
    assert not (task / "run").exists()
    assert command(task, *start).returncode == 0  # without workers


@pytest.mark.slow
@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2"])
def test_digits(tmp_path, config):
    # Two evaluations, and saves with EMA weights.
    trained(tmp_path, "digits", "--duration", "40", "--ema.half_life", "5ep", config=config)


@pytest.mark.slow
def test_the_micro_batch_is_searched_in_a_spawned_process(tmp_path):
    trained(tmp_path, "digits", *SHORT, "--batch.micro", "auto", children=(SPAWNED,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "sft", "snippets", "docstrings"])
def test_data_that_processes_prepare(tmp_path, name):
    # Token caches, checks of images and data workers are spawned.
    own = words(tmp_path, name)
    workers = ["--machine.workers", "2"] if name != "sft" else []
    trained(tmp_path, *own, "--duration", "4", *NO_EVALUATION, *workers, children=(SPAWNED,))


@pytest.mark.slow
def test_a_script_without_a_guard_checks_its_images_in_processes(tmp_path):
    # A spawned process that imported the script would train, too.
    words(tmp_path, "images")
    (tmp_path / "script.py").write_text(
        "from oneloop import fit\n"
        "fit('images', task={'data': 'images'}, batch={'size': 4}, duration=2,\n"
        "    run={'dir': 'run'}, track='none')\n"
    )
    found = script(tmp_path)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    started = (tmp_path / "log").read_text()
    assert SPAWNED in started


MEMORY_MAPPED = """
import numpy as np, pathlib, sys, tempfile
from multiprocessing import get_context
from oneloop.basics.system.start_methods import start_context


def kind(array, queue):
    queue.put((type(array.base).__name__, array.flags.writeable, array.tolist()))


def sent(array):
    context = start_context()
    queue = context.SimpleQueue()
    process = context.Process(target=kind, args=(array, queue))
    process.start()
    base, writeable, values = queue.get()
    process.join()
    assert values == array.tolist(), values
    return base, writeable


if __name__ == "__main__":
    np.save("rows.npy", np.arange(12).reshape(3, 4))
    np.save("columns.npy", np.asfortranarray(np.arange(12).reshape(3, 4)))
    np.arange(20, dtype=np.int32).tofile("raw.bin")
    assert sent(np.load("rows.npy", mmap_mode="r")) == ("mmap", False)
    assert sent(np.load("columns.npy", mmap_mode="r")) == ("mmap", False)
    assert sent(np.memmap("raw.bin", np.int32, "r", offset=8, shape=(3,)))[0] == "mmap"
    assert sent(np.memmap("raw.bin", ">i4", "r"))[0] == "mmap"
    assert sent(np.memmap("raw.bin", np.int32, "r")[2:5])[0] != "mmap"
    changed = np.memmap("raw.bin", np.int32, "c")
    changed[:] = 7
    assert sent(changed)[0] != "mmap"
    with tempfile.TemporaryFile() as file:
        file.write(b"1234" * 4)
        file.flush()
        assert sent(np.memmap(file, np.int32, "r"))[0] != "mmap"
    print("equal")
"""


def test_memory_mapped_arrays_are_mapped_again_only_if_that_is_exact(tmp_path):
    (tmp_path / "script.py").write_text(MEMORY_MAPPED)
    found = script(tmp_path)
    assert found.stdout.endswith("equal\n"), found.stderr


SLOW_IMPORT = """
import multiprocessing, time
if multiprocessing.parent_process() is not None:
    time.sleep(20)
"""


@pytest.mark.slow
def test_a_worker_that_starts_slowly_is_no_hang(task):
    (task / "my_task.py").write_text(SLOW_IMPORT + TASK)
    given = ["my_task.py:MyTask", *SHORT, *NO_EVALUATION, "--machine.workers", "1"]
    output = launched(task, *given).communicate(timeout=280)[0]
    assert "done; results in" in output, output


@pytest.mark.slow
def test_a_script_without_a_guard_gets_a_message(task):
    (task / "script.py").write_text(
        "from oneloop import fit\nimport my_task\nfit(my_task.MyTask, duration=2, "
        "batch={'size': 8}, machine={'workers': 1}, run={'dir': 'run'}, track='none')\n"
    )
    found = script(task)
    assert found.returncode == 1
    assert 'put the call under if __name__ == "__main__":' in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the launcher", "the supervisor", "the training process"])
def test_a_run_resumes_after_a_kill(tmp_path, victim):
    given = ["digits", "--duration", "1500", "--save.every", "50", "--batch.size", "16"]
    process = launched(tmp_path, *given)
    checkpoints = tmp_path / "emulated" / "checkpoints"
    until = time.monotonic() + 120
    while not [*checkpoints.glob("step-????????")] and time.monotonic() < until:
        time.sleep(0.02)

    # The launcher starts the supervisor, which starts the training process.
    pids = {"the launcher": process.pid}
    for name in ("the supervisor", "the training process"):
        parent = psutil.Process([*pids.values()][-1])
        [child] = [one for one in parent.children() if "oneloop.train" in " ".join(one.cmdline())]
        pids[name] = child.pid
    os.kill(pids[victim], signal.SIGKILL)
    process.communicate(timeout=120)
    gone(list(pids.values()))

    newest = max(checkpoints.glob("step-????????")).name
    assert newest < "step-00001500"  # it was killed before its end
    assert launched(tmp_path, *given).communicate(timeout=120) is not None
    summary = json.loads((tmp_path / "emulated" / "summary.json").read_text())
    assert summary["exit_code"] == 0
    plain(tmp_path, *given)


@pytest.mark.slow
def test_commands_on_a_run(tmp_path):
    assert command(tmp_path, "plan", "digits").returncode == 0
    process = launched(tmp_path, "digits", "--duration", "20")
    assert process.communicate(timeout=120) and process.returncode == 0
    found = {}
    for macos in (True, False):
        to = f"rows-{macos}.jsonl"
        evaluated = command(tmp_path, "evaluate", "emulated", macos=macos)
        predicted = command(tmp_path, "predict", "emulated", "--to", to, macos=macos)
        for result in (evaluated, predicted):
            assert result.returncode == 0, result.stderr
        found[macos] = evaluated.stdout, (tmp_path / to).read_bytes()
    assert found[True] == found[False]
    assert command(tmp_path, "report", "emulated").returncode == 0
    assert (tmp_path / "emulated" / "report.html").stat().st_size > 10_000
    assert command(tmp_path, "check", "digits").returncode == 0
    assert command(tmp_path, "verify", "emulated").returncode == 0
    assert command(tmp_path, "doctor").returncode == 0
