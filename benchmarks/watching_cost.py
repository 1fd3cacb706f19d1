"""What all watching costs of a step of about 5 ms, in three stages: marks of the clock and sums of the meter at every step;
at every twentieth (the default of log.every) the update ratio and the read; a line in metrics.jsonl, TensorBoard, the
terminal, and advice.

    python benchmarks/watching_cost.py

One process on a CPU. Machines are noisier than 1 %, so cycles of twenty steps alternate, bare, watched, bare (control), each
turn in another order; the difference to the bare cycle of the same turn is taken, and of all differences the median, with
the 95 % interval of that median. glibc is told to keep freed memory: else it gives it back and takes it again in turns that
any small allocation moves about (500 page faults a cycle or 240), by more than what is to be measured.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn

from oneloop.watch.diagnosis import Advice
from oneloop.watch.meter import Meter
from oneloop.watch.progress import Display
from oneloop.watch.tracking import Tracking

CYCLE = 20  # the default of log.every


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--cycles", type=int, default=300)
    asked.add_argument("--rows", type=int, default=192, help="of a batch: how long a step takes")
    given = asked.parse_args()
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        kept = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | kept)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        measure(given.cycles, given.rows, Path(scratch))


def measure(cycles: int, rows: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(rows, 256)
    meter = Meter(accelerator, list(model.parameters()), flops=1e6, peak=1e11)
    tracking = Tracking(accelerator, folder, project="cost", config={})
    display = Display(console=Console(file=io.StringIO()))
    display.begin(0, total=10**9)
    advice = Advice(workers=0, cores=2)
    norm = torch.tensor(1.0)
    done = 0

    def bare() -> None:
        for _ in range(CYCLE):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def watched(read: bool = True, write: bool = True) -> None:
        nonlocal done
        meter.clock.restart()  # the cycles between were not its own
        for step in range(1, CYCLE + 1):
            meter.clock.mark("data")
            meter.clock.mark("other")
            meter.clock.mark("transfer")
            loss = model(x).square().mean()
            loss.backward()
            meter.clock.mark("compute")
            if read and step == CYCLE:
                meter.before_update()
            optimizer.step()
            optimizer.zero_grad()
            meter.step(loss=loss.detach(), weight=192.0, samples=192, norm=norm)
            meter.clock.mark("update")
            meter.clock.step()
        done += CYCLE
        if not read:
            meter._losses.clear()
            return
        figures = meter.read()
        if not write:
            return
        tracking.log({"step": done, "samples": 192 * done, "time": 1.0, "train/lr": 1e-4, **figures})
        display.figures(done, figures)
        advice(meter.clock.overall)

    def timed(act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        return (time.perf_counter() - began) / CYCLE * 1e6

    kinds: dict[str, Callable[[], None]] = {
        "bare": bare,
        "marks and sums": lambda: watched(read=False),
        "read at the 20th": lambda: watched(write=False),
        "written too: all of it": watched,
        "bare again (control)": bare,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(cycles + 10):
        for name in random.Random(turn).sample(list(kinds), len(kinds)):
            took = timed(kinds[name])
            if turn >= 10:
                found[name].append(took)
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread, {cycles} cycles of"
          f" {CYCLE} steps; microseconds per step")  # fmt: skip
    middle = statistics.median(found["bare"])
    for name, times in found.items():
        over = sorted(a - b for a, b in zip(times, found["bare"], strict=True))
        reach = round(0.98 * math.sqrt(cycles))  # ranks of the median's 95 % interval
        low, high = over[cycles // 2 - reach], over[cycles // 2 + reach]
        print(f"{name:22} median {statistics.median(times):8.1f}   over bare {statistics.median(over):7.1f} ({low:7.1f} to {high:7.1f})"
              f"   {100 * statistics.median(over) / middle:6.2f} % ({100 * low / middle:.2f} to {100 * high / middle:.2f})")  # fmt: skip
    tracking.close()


if __name__ == "__main__":
    main()
