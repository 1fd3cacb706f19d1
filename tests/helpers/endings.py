"""Start runs of the faulty task, and read how they ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
