"""Measure a run with saves, and a save of 200 MB, next to another checkout.

    git worktree add ../before COMMIT
    python benchmarks/save_cost.py --against ../before

Rounds alternate: the other checkout, this one, the other again (control). A run is `digits` with 60
steps and 6 saves, in CPU seconds. A save is that of a layer with AdamW: the milliseconds in which
the caller waits, and those until the checkpoint is complete.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SAVE = """
import statistics, tempfile, time, torch
from pathlib import Path
from accelerate import Accelerator
from oneloop.checkpoint.checkpoints import Checkpoints
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(1, 4096)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as folder:
    checkpoints = Checkpoints(Path(folder) / "checkpoints", accelerator)
    blocked, complete = [], []
    for step in range(1, 7):
        began = time.perf_counter()
        checkpoints.save(step, model, optimizer, {})
        blocked.append(1e3 * (time.perf_counter() - began))
        checkpoints.finish()
        complete.append(1e3 * (time.perf_counter() - began))
    print(statistics.median(blocked[1:]), statistics.median(complete[1:]))
    checkpoints.close()
"""
RUN = "digits --duration 60 --save.every 10 --track none --watch.output quiet --run.dir run"


def measured(checkout: Path) -> list[float]:
    """Return CPU seconds of the run, and the two times of a save."""
    variables = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "oneloop.train", *RUN.split()]
        subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    words = [sys.executable, "-c", SAVE]
    done = subprocess.run(words, env=variables, check=True, capture_output=True, text=True)
    return [seconds, *map(float, done.stdout.split())]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--against", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    here = Path(__file__).parents[1]
    places = {"the other": given.against, "this": here, "the other again": given.against}
    found: dict[str, list[list[float]]] = {name: [] for name in places}
    for _ in range(given.rounds):
        for name, place in places.items():
            found[name].append(measured(place))
    for name, rounds in found.items():
        for what, values in zip(("run, CPU s", "blocked, ms", "complete, ms"), zip(*rounds)):
            spread = f"min {min(values):8.2f}   max {max(values):8.2f}"
            print(f"{name:16} {what:13} median {statistics.median(values):8.2f}   {spread}")
