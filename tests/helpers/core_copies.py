"""Copies of oneloop without tasks and tools, and a task that trains with such a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from worlds import CONFIGS, ROOT

PACKAGE = ROOT / "src" / "oneloop"
TASK = """
import os
import time

import torch
from torch import nn


class Line:
    def model(self):
        return nn.Linear(1, 1)

    def train_set(self):
        return [(torch.tensor([x / 100]), torch.tensor([x / 50 + 1])) for x in range(100)]

    def eval_sets(self):
        return {"eval": self.train_set()[:10]}

    def collate(self, samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return (model(batch["x"]) - batch["y"]).square().sum(), {}
"""
"""``PAUSE``: seconds of a micro-batch, in which a test sends a signal"""

LAUNCHERS = {
    "single": ["-m", "oneloop.train"],
    "ddp with accelerate": [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / "ddp.yaml"),
        "-m",
        "oneloop.train",
    ],
    "ddp with oneloop": ["-m", "oneloop", "launch", "--config_file", str(CONFIGS / "ddp.yaml")],
}
"""commands that train, on one process or on two"""


def copied(folder: Path, *left_out: str) -> None:
    """Write a copy of oneloop and the task to ``folder``.

    Args:
        folder: gets ``oneloop`` and ``line.py``.
        left_out: names of files and folders that the copy lacks.
    """
    ignored = shutil.ignore_patterns("__pycache__", *left_out)
    shutil.copytree(PACKAGE, folder / "oneloop", ignore=ignored)
    # as in an installed package
    shutil.copytree(CONFIGS, folder / "oneloop" / "accelerate_configs")
    (folder / "line.py").write_text(TASK)


def line_command(launcher: str, words: Sequence[str]) -> list[str]:
    """Return the command that trains the task."""
    return [sys.executable, *LAUNCHERS[launcher], "line.py:Line", "--run.dir", "run", *words]


def variables(package: Path, pause: float = 0.0) -> dict[str, str]:
    """Return the environment of a run with the copy of oneloop in ``package``."""
    return {
        "PYTHONPATH": str(package),
        "PATH": "",
        "OMP_NUM_THREADS": "1",
        "PAUSE": str(pause),
    }


def train(
    folder: Path, *words: str, launcher: str = "single", pause: float = 0.0
) -> subprocess.CompletedProcess:
    """Train the task with the copy of oneloop in ``folder``, until the end."""
    command = line_command(launcher, words)
    environment = variables(folder, pause)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
