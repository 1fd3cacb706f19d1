"""Measure the peak memory of a repeated micro-batch beside that of a step.

    python benchmarks/repeat_memory.py

A model of 256 MB trains in this process. Linux counts the largest resident memory since it was last
asked to forget it (``/proc/self/clear_refs``), so the peak within each repeat, and within the
accumulation of gradients of each step, is read from there. A second run has the checks off.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 4096  # of four layers: 64 MB of weights each
SAMPLES = 512  # of a micro-batch: 8 MB of each layer's outputs
PEAKS: dict[str, list[float]] = {"step": [], "repeat": []}


class Wide:
    """Regression with a wide model."""

    def model(self) -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers)

    def train_set(self) -> torch.Tensor:
        return torch.randn(4 * SAMPLES, 8, generator=torch.Generator().manual_seed(1))

    def eval_sets(self) -> dict[str, torch.Tensor]:
        return {"validation": self.train_set()[:8]}

    def collate(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(samples).repeat(1, WIDTH // 8)}

    def weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        return model(batch["x"]).square().mean(1).sum(), {}


def peak(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which then records the peak memory of its calls, in MB."""

    def measured(*given: Any, **named: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        result = function(*given, **named)
        status = Path("/proc/self/status").read_text()
        PEAKS[name].append(int(status.partition("VmHWM:")[2].split()[0]) / 1000)
        return result

    return measured


def main() -> None:
    from oneloop import train
    from oneloop.checks.repeats import Checks

    Checks._repeat = peak("repeat", Checks._repeat)  # type: ignore[method-assign]
    train.accumulate = peak("step", train.accumulate)
    train.Run.end = lambda run, code: None  # type: ignore[method-assign,assignment]
    words = ["--task", "repeat_memory.Wide", "--batch.size", str(SAMPLES), "--duration", "8"]
    words += [
        "--optimizer.name",
        "sgd",
        "--eval.every",
        "0",
        "--save.every",
        "0",
        "--track",
        "none",
    ]
    words += ["--save.final", "last", "--save.best", "false", "--log.every", "1"]
    print(f"# {date.today()}  python {' '.join(sys.argv)}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores; MB of resident memory"
    )
    for every in ("0", "4", "0"):
        for values in PEAKS.values():
            values.clear()
        with tempfile.TemporaryDirectory() as folder:
            more = ["--machine.check_every", every, "--run.dir", f"{folder}/run"]
            train.main([*words, *more])
        for name, values in PEAKS.items():
            if values:
                print(
                    f"machine.check_every {every}: {len(values)} calls, {name}: median "
                    f"{statistics.median(values):,.0f}, most {max(values):,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
