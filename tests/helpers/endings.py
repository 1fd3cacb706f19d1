"""Start runs of the faulty task, and read how they ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from worlds import run, train

RECIPE = (
    "task: faulty.Faulty\nbatch: {size: 8}\nduration: 200\nlog: {every: 10}\neval: {every: 50}\n"
)
RECIPE += "save: {every: 10}\ntrack: []\nrun: {dir: run}\n"


def faulty(folder: Path, *words: str, config: str = "single", ranks: int = 1, **how):
    return run(
        train, ["f.yaml", *words], config=config, ranks=ranks, folder=folder, watch=True, **how
    )


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


LAUNCHERS = {
    "oneloop": [sys.executable, "-m", "oneloop", "launch"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
}


def supervisors(launcher: int) -> list[psutil.Process]:
    """Return the supervisors, one per rank, that a launcher (process id) has started."""
    family = psutil.Process(launcher).children(recursive=True)
    # Launchers have the name of the program among their arguments, too.
    trainers = [
        process
        for process in family
        if "oneloop.train" in (words := process.cmdline())
        and not any("launch" in word for word in words)
    ]

    # Each supervisor has one child, the training process.
    pids = {process.pid for process in trainers}
    return [process for process in trainers if process.ppid() not in pids]
