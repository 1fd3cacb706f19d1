"""Measure a start (goal C7): CPU time of imports, --help, bad input and a dry run, next to the
libraries' imports.

    python benchmarks/start_cost.py
    python benchmarks/start_cost.py --against ../before    # this one divided by the other

Each command is a separate process. Rounds alternate over all commands; ratios are computed per
round. CPU time (user and system, with children) varies less than seconds on a busy machine, and is
what drains a laptop's battery.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from functools import partial
from pathlib import Path

LIBRARIES = "import torch, accelerate"
ADAMW = "import torch, accelerate; torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])"
BUILT = """
import torch, oneloop.train
from oneloop.checkpoint.optimizer_trial import try_optimizer
from oneloop.optim.optimizers import adamw, build
make = lambda model: build(adamw, model, lr=0.1, weight_decay=0.0)
make(torch.nn.Linear(2, 2)).step()
"""
TRIAL = f"{BUILT}try_optimizer(make, torch.zeros(1), ['lr'])"
LEAVES = (
    *(
        "ema",
        "evaluation",
        "data.step_batches",
        "optim.optimizers",
        "optim.clip",
        "optim.bad_step_guard",
        "machine.recompute",
    ),
    *(
        "machine.compile",
        "checks.replicas",
        "checkpoint.checkpoints",
        "measure.meter",
    ),
    *(
        "measure.noise_scale",
        "measure.profiling",
        "show.tracking",
        "tasks.image_classification",
        "tasks.causal_lm",
    ),
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def commands(folder: str) -> dict[str, tuple[list[str], str]]:
    """Return the commands, and the command that each is compared with."""
    train = [sys.executable, "-m", "oneloop.train"]
    return {
        "import torch, accelerate": (python(LIBRARIES), ""),
        "import torch, accelerate again (control)": (python(LIBRARIES), "import torch, accelerate"),
        "import oneloop": (python("import oneloop"), "import torch, accelerate"),
        "oneloop.train digits --help": ([*train, "digits", "--help"], "import torch, accelerate"),
        "oneloop.train digits --batch.siez 3": (
            [*train, "digits", "--batch.siez", "3"],
            "import torch, accelerate",
        ),
        "these and one AdamW": (python(ADAMW), "import torch, accelerate"),
        "import oneloop.train": (python("import oneloop.train"), "these and one AdamW"),
        **{
            f"import oneloop.{leaf}": (python(f"import oneloop.{leaf}"), "these and one AdamW")
            for leaf in LEAVES
        },
        "oneloop.train and a step of AdamW": (python(BUILT), "these and one AdamW"),
        "these and the trial of it": (python(TRIAL), "oneloop.train and a step of AdamW"),
        "a dry run of digits": (
            [
                *train,
                "digits",
                "--debug.dry_run",
                "--run.dir",
                f"{folder}/run",
                "--run.resume",
                "auto",
            ],
            "these and one AdamW",
        ),
        "a run of digits, 50 steps": (
            [
                *train,
                "digits",
                "--duration",
                "50",
                "--run.dir",
                f"{folder}/trained",
                "--track",
                "[]",
            ],
            "these and one AdamW",
        ),
    }


def against(other: Path, folder: str) -> dict[str, tuple[list[str], str]]:
    """Return commands of this checkout, each next to that of the other checkout and, as a control,
    repeated."""
    there = ["env", f"PYTHONPATH={other.resolve() / 'src'}"]
    made: dict[str, tuple[list[str], str]] = {}
    for turn, (suffix, prefix) in enumerate(
        {", the other": there, "": [], ", the other again (control)": there}.items()
    ):
        for name, (command, _) in commands(f"{folder}/{turn}").items():
            if "train" in name or "run" in name:
                made[name + suffix] = ([*prefix, *command], f"{name}, the other" if turn else "")
    return made


def cost(command: list[str], folder: str) -> tuple[float, float]:
    """Return CPU seconds (user and system) and peak memory (MB) of a process with its children."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--rounds", type=int, default=6)
    asked.add_argument("--against", type=Path, help="another checkout")
    given = asked.parse_args()
    timed = partial(against, given.against) if given.against else commands
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for turn in range(given.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            for name, (command, _) in timed(folder).items():
                took, held = cost(command, folder)
                if turn:
                    seconds.setdefault(name, []).append(took)
                    memory.setdefault(name, []).append(held)
    import torch

    print(f"# {date.today()}  {' '.join(['python', Path(sys.argv[0]).as_posix(), *sys.argv[1:]])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, OMP_NUM_THREADS"
        f" {os.environ['OMP_NUM_THREADS']}, {given.rounds} rounds; CPU seconds"
    )
    for name, (_, base) in timed("").items():
        times = seconds[name]
        ratio = (
            statistics.median(a / b for a, b in zip(times, seconds[base], strict=True))
            if base
            else 1.0
        )
        print(
            f"{name:62} median {statistics.median(times):5.2f}   min {min(times):5.2f}   max "
            f"{max(times):5.2f}"
            f"   {statistics.median(memory[name]):6.0f} MB"
            + (f"   {ratio:.2f}x {base}" if base else "")
        )


if __name__ == "__main__":
    main()
