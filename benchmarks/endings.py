"""Show how runs end after a fault: signals and faults x affected process x strategy x launcher,
from the command line.

    python benchmarks/endings.py [--configs single ddp fsdp2] [--launchers oneloop accelerate]
    [--repeats 1]

Each row has the seconds from the fault to the end of the launcher, the exit code, the exit code in
summary.json, the remaining processes, whether the same command then resumes to bit-identical
weights of an undisturbed run, and the last line of oneloop's output. A hanging rank ends at the
default of machine.patience.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from accelerate import __version__ as accelerate_version

HERE = Path(__file__).parent
RECIPE = """task: {name: faulty.Faulty, pause: 0.02}
batch: {size: 8}
duration: 300
log: {every: 20}
eval: {every: 100}
save: {every: 20}
track: []
run: {dir: run}
"""


class Ending(NamedTuple):
    """One fault."""

    name: str
    words: tuple[str, ...] = ()
    """of the task: a fault of its own"""
    signal: int = 0
    to: str = ""
    """who gets the signal: launcher, watcher or trainer (of the last rank)"""


def fault(what: str, where: str = "loss") -> tuple[str, ...]:
    return ("--task.fault", what, "--task.where", where, "--task.at", "160", "--task.once", "once")


ENDINGS = [
    Ending("SIGTERM to the launcher", signal=signal.SIGTERM, to="launcher"),
    Ending("SIGUSR1 to the launcher", signal=signal.SIGUSR1, to="launcher"),
    Ending("SIGKILL to the launcher", signal=signal.SIGKILL, to="launcher"),
    Ending("SIGTERM to one watcher", signal=signal.SIGTERM, to="watcher"),
    Ending("SIGTERM to one trainer", signal=signal.SIGTERM, to="trainer"),
    Ending("SIGKILL to one trainer", signal=signal.SIGKILL, to="trainer"),
    Ending("SIGSTOP to one trainer", signal=signal.SIGSTOP, to="trainer"),
    Ending("an exception", fault("raise:ValueError")),
    Ending("StopIteration in a sample", fault("raise:StopIteration", "sample")),
    Ending("sys.exit(3)", fault("exit:3")),
    Ending("os._exit(5)", fault("os_exit:5")),
    Ending("an endless loop in a sample", fault("loop", "sample")),
    Ending("a loss that never returns", fault("read")),
]


def command(launcher: str, config: str, *words: str) -> list[str]:
    file = str(HERE.parent / "accelerate_configs" / f"{config}.yaml")
    if launcher == "oneloop":
        return [sys.executable, "-m", "oneloop", "launch", "--config_file", file, "f.yaml", *words]
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        file,
    ]
    return [*start, "-m", "oneloop.train", "f.yaml", *words]


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def victim(process: subprocess.Popen[bytes], to: str) -> int:
    """Return the pid of the launcher, or of the last rank's training process or supervisor (its
    parent)."""
    if to == "launcher":
        return process.pid
    ours = [
        one
        for one in family(process.pid)
        if "oneloop.train" in one.cmdline() and "launch" not in one.cmdline()
    ]
    pids = {one.pid for one in ours}
    trainers = [
        one
        for one in ours
        if one.ppid() in pids and "oneloop.checkpoint.writer" not in one.cmdline()
    ]
    trainer = max(trainers, key=lambda one: int(one.environ().get("RANK", "0")))
    return trainer.pid if to == "trainer" else trainer.ppid()


def weights(folder: Path) -> str:
    file = folder / "run" / "final" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else "none"


def finished(launcher: str, config: str, folder: Path, *words: str) -> str:
    """Return the output of the undisturbed command."""
    typed = command(launcher, config, *words)
    return subprocess.run(
        typed, cwd=folder, capture_output=True, timeout=200, check=False, text=True
    ).stderr


def measured(ending: Ending, launcher: str, config: str, folder: Path, expected: str) -> str:
    """Return one row of the table."""
    ranks = 1 if config == "single" else 2
    words = [*ending.words, *(["--task.rank", str(ranks - 1)] if ending.words else [])]
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command(launcher, config, *words), cwd=folder, stdout=file, stderr=file
        )
        mark = folder / ("once" if ending.words else "run/checkpoints/step-00000040")
        seen: dict[int, psutil.Process] = {}
        while not mark.exists() and process.poll() is None:
            seen |= {one.pid: one for one in family(process.pid)}
            time.sleep(0.02)
        if ending.signal:
            seen |= {one.pid: one for one in family(process.pid)}
            os.kill(victim(process, ending.to), ending.signal)
        began = time.monotonic()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        _, left = psutil.wait_procs([*seen.values()], 12 if ending.to == "launcher" else 1)
        seconds = time.monotonic() - began
    for one in left:
        one.kill()
    summary = folder / "run" / "summary.json"
    code = (
        next((line for line in summary.read_text().splitlines() if "exit_code" in line), "")
        if summary.exists()
        else ""
    )
    reports = [
        line
        for line in output.read_text().splitlines()
        if line.startswith("oneloop: ") or "results in" in line
    ]
    then = finished(launcher, config, folder, *words)
    same = "yes" if weights(folder) == expected else "NO"
    if same == "NO":
        print(f"{weights(folder)} instead of {expected}\n{then}", file=sys.stderr)
    last = (reports or ["-"])[-1].removeprefix("oneloop: ")[:90]
    written = code.partition(":")[2].strip(" ,") or "-"
    return (
        f"{seconds:5.1f}  {process.returncode!s:>4}  {written:>7}  {len(left):>4}  {same:>4}  "
        f"{last}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=["single", "ddp", "fsdp2"])
    parser.add_argument("--launchers", nargs="+", default=["oneloop", "accelerate"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--endings", nargs="+", default=[""], help="parts of the names of those that are wanted"
    )
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [
            str(HERE.parent / "src"),
            str(HERE.parent / "tests" / "helpers"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch",
        end="",
    )
    print(f" {torch.__version__}, accelerate {accelerate_version}\n")
    print(f"{'':28}  {'':6}  {'launcher':10}  secs  exit  summary  left  same  last line")
    with tempfile.TemporaryDirectory() as scratch:
        for launcher in given.launchers:
            for config in given.configs:
                undisturbed = Path(scratch) / "undisturbed"
                undisturbed.mkdir()
                (undisturbed / "f.yaml").write_text(RECIPE)
                finished(launcher, config, undisturbed)
                expected = weights(undisturbed)
                shutil.rmtree(undisturbed)
                for ending in ENDINGS:
                    if config == "single" and ending.signal == signal.SIGSTOP:
                        continue  # with one process this is the stop that the user requested
                    if not any(part in ending.name for part in given.endings):
                        continue
                    for _ in range(given.repeats):
                        folder = Path(scratch) / "disturbed"
                        folder.mkdir()
                        (folder / "f.yaml").write_text(RECIPE)
                        row = measured(ending, launcher, config, folder, expected)
                        print(f"{ending.name:28}  {config:6}  {launcher:10} {row}", flush=True)
                        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
