"""Measure the cost of the loop per step over a hand-written one with the same features (goal C1).

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --against ../before    # this checkout's loop next to the other's

One process on a CPU, with a model so small that the loop dominates. Both use batches from a
DataLoader, accelerate's `accumulate` and `backward`, the global gradient norm, clipping, a learning
rate per step, fused AdamW with weight decay on matrices only, and a loss that is summed on the
device. The hand-written loop has no seeds, guard, counters or stops. Runs alternate: by hand with
accelerate, by hand with torch alone, oneloop, the other checkout, by hand again (control).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from oneloop.job.build import build_job
from oneloop.launch.processes import Run, start
from oneloop.recipe.parse import read
from oneloop.run.folder import Folder
from oneloop.train import train

BATCH = 8


class Points:
    """A data set in memory, without randomness."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class Tiny:
    """A task of one linear layer."""

    sample_weight = 1.0

    def model(self) -> nn.Module:
        return nn.Linear(16, 16)

    def train_set(self) -> Points:
        return Points()

    def eval_sets(self) -> dict[str, Points]:
        return {}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {"x": torch.stack(samples)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return (model(batch["x"]) - batch["x"]).square().mean(1).sum(), {}


def by_hand(run: Run, steps: int, *, accelerate: bool = True) -> float:
    """Return seconds per step of the hand-written loop; without accelerate it uses torch alone."""
    task, accelerator = Tiny(), run.accelerator
    model = accelerator.prepare(task.model()) if accelerate else task.model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    data = Points()
    sampler = RandomSampler(data, num_samples=(steps + 50) * BATCH, replacement=False)
    loader = iter(DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=task.collate))
    total = torch.zeros((), dtype=torch.float64)
    began = 0.0
    for step in range(steps + 50):
        if step == 50:
            began = time.perf_counter()
        batch = next(loader)
        if accelerate:
            with accelerator.accumulate(model):
                loss, _ = task.loss(model, batch)
                accelerator.backward(loss / BATCH)
        else:
            loss, _ = task.loss(model, batch)
            (loss / BATCH).backward()
        total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / (steps + 50))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / steps


def by_oneloop(run: Run, steps: int) -> float:
    """Return seconds per step of oneloop, between its log lines at step 50 and at the end."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        sys.path.insert(0, str(Path(__file__).parent))
        recipe = read(
            [
                "digits",
                "--task",
                "step_cost.Tiny",
                "--duration",
                str(steps + 50),
                "--batch.size",
                str(BATCH),
                "--schedule.name",
                "linear",
                "--schedule.warmup",
                "0",
                "--track",
                "none",
                "--save.every",
                "0",
                "--log.every",
                "50",
                "--run.dir",
                scratch,
            ]
        )
        folder = Folder(Path(scratch) / "run")
        with run.closing:
            summary = train(build_job(recipe, ranks=1), run, folder)
        assert summary["exit_code"] == 0
        import json

        lines = [
            json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()
        ]
        times = [line["time"] for line in lines if "time" in line]
        folder.close()
    return (times[-1] - times[0]) / steps


class Checkout:
    """The same measurement with the code of another checkout, in a separate process that stays
    alive."""

    CODE = (
        "import json, sys, torch; sys.path.insert(0, 'benchmarks'); import step_cost as c; "
        "torch.set_num_threads(1)\n"
        "run = c.start()\n"
        "for line in sys.stdin: print(json.dumps(c.by_oneloop(run, int(line))), flush=True)"
    )

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, steps: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=2000)
    asked.add_argument("--pairs", type=int, default=8)
    asked.add_argument(
        "--against", type=Path, help="another checkout, whose loop is timed beside this one's"
    )
    given = asked.parse_args()
    torch.set_num_threads(1)
    run = start()
    other = Checkout(given.against) if given.against else None
    measures: dict[str, Callable[[int], float]] = {
        "by hand, accelerate": partial(by_hand, run),
        "by hand, torch alone": partial(by_hand, run, accelerate=False),
        "oneloop": partial(by_oneloop, run),
        **({"oneloop, the other checkout": other} if other else {}),
        "by hand again (control)": partial(by_hand, run),
    }
    rounds = [
        {name: measure(given.steps) * 1e6 for name, measure in measures.items()}
        for _ in range(given.pairs + 1)
    ]
    if other:
        other.close()
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, 1 thread,"
        f" {given.steps} steps, {given.pairs} rounds; microseconds per step, and over the "
        "baselines in the same round"
    )
    base, alone = "by hand, accelerate", "by hand, torch alone"
    for name in measures:
        times = [times[name] for times in rounds[1:]]
        over = [
            statistics.median(times[name] - times[of] for times in rounds[1:])
            for of in (base, alone)
        ]
        print(
            f"{name:28} median {statistics.median(times):7.1f}   min {min(times):7.1f}   max "
            f"{max(times):7.1f}"
            f"   over accelerate by hand {over[0]:+7.1f}   over torch alone {over[1]:+7.1f}"
        )
    control = statistics.median(
        times["by hand again (control)"] / times[base] for times in rounds[1:]
    )
    print(f"control {control:.3f}x")


if __name__ == "__main__":
    main()
