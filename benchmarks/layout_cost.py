"""Measure the step time under DDP and FSDP2, compared with another checkout (goal C10): real runs,
alternating.

    git worktree add ../before COMMIT
    python benchmarks/layout_cost.py ../before . --pairs 6

Each run trains `digits` on two processes with two micro-batches per step, and reports the median
step time after the first tenth. Each round runs both checkouts in a new order, and the first one
twice (control).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

CONFIGS = ("ddp", "fsdp2")


def seconds(checkout: Path, config: str, steps: int) -> float:
    """Return the median seconds of a step, in a new run of this checkout's code."""
    every = steps // 20
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            "digits",
            "--duration",
            str(steps),
            "--batch.micro",
            "16",
            "--log.every",
            str(every),
        ]
        words += [
            "--eval.every",
            "0",
            "--save.every",
            "0",
            "--track",
            "none",
            "--run.dir",
            f"{scratch}/run",
        ]
        command = [sys.executable, "-m", "oneloop", "launch", "--config_file", config, *words]
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout.resolve() / "src"),
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(command, env=environment, cwd=scratch, check=True, capture_output=True)
        lines = map(json.loads, Path(scratch, "run", "metrics.jsonl").read_text().splitlines())
        rates = [
            line["samples"] / line["step"] / line["train/samples_per_second"]
            for line in lines
            if "train/lr" in line
        ]
    return statistics.median(rates[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs=2, type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    before, after = given.checkouts
    print(
        f"# {date.today()}  python benchmarks/layout_cost.py BEFORE AFTER --pairs "
        f"{given.pairs} --steps {given.steps}"
    )
    print(
        f"# Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores; "
        "microseconds per step"
    )
    for config in CONFIGS:
        found: dict[str, list[float]] = {"before": [], "after": [], "before again": []}
        for number in range(given.pairs):
            names = list(found)
            random.Random(number).shuffle(names)
            for name in names:
                found[name].append(
                    1e6 * seconds(after if name == "after" else before, config, given.steps)
                )
        for name, values in found.items():
            ratios = [value / first for value, first in zip(values, found["before"], strict=True)]
            spread = (
                f"median {statistics.median(values):8.1f}  min {min(values):8.1f}  max "
                f"{max(values):8.1f}"
            )
            over = f"{statistics.median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"{config:6} {name:13} {spread}  over before {over}", flush=True)


if __name__ == "__main__":
    main()
