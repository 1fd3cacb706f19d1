"""What all watching costs of a step of about 5 ms, in three stages: marks of the clock and sums of the meter at every step;
at every fiftieth (the default of log.every) the update ratio and the read; a line in metrics.jsonl, TensorBoard, the
terminal, and advice. TensorBoard gets each line at once and is waited for, which costs more than every five seconds; the
redraws of the bars, one a second on a thread of their own, are timed apart and added as if nothing overlapped them.

    python benchmarks/watching_cost.py

One process on a CPU. Machines are noisier than 1 %, so cycles of fifty steps alternate, bare, watched, bare (control), each
turn in another order; the difference to the bare cycle of the same turn is taken, and of all differences the median, with
the 95 % interval of that median. Python's garbage is left lying, as in train.py between two times of machine.gc_every.
glibc is told to keep freed memory: else it gives it back and takes it again in turns that any small allocation moves about
(500 page faults a cycle or 240), by more than what is to be measured.
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

from oneloop.memory.garbage import scheduled_garbage
from oneloop.recipe import Log
from oneloop.watch import tracking as tracking_module
from oneloop.watch.diagnosis import Advice
from oneloop.watch.meter import Meter
from oneloop.watch.progress import Display
from oneloop.watch.tracking import Tracking

CYCLE = int(Log().every.amount)  # steps


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--cycles", type=int, default=400)
    asked.add_argument("--rows", type=int, default=160, help="of a batch: how long a step takes")
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
    tracking_module._HAND_OVER = 0.0
    tracking = Tracking(accelerator, folder, project="cost", config={})
    done = 0
    display = Display(console=Console(file=io.StringIO()))
    display.begin(lambda: done, total=10**9)
    advice = Advice(workers=0, cores=2)
    norm = torch.tensor(1.0)

    def bare() -> None:
        for _ in range(CYCLE):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.detach()  # as train.py does for its guard

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
            value = loss.detach()
            meter.step(loss=value, weight=160.0, samples=160, norm=norm)
            meter.clock.mark("update")
            meter.clock.step()
        done += CYCLE
        if not read:
            meter._losses.clear()
            return
        figures = meter.read()
        if not write:
            return
        tracking.log({"step": done, "samples": 160 * done, "time": 1.0, "train/lr": 1e-4, **figures})
        display.figures(done, figures)
        advice(meter.clock.overall)

    def timed(act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        return (time.perf_counter() - began) / CYCLE * 1e6

    kinds: dict[str, Callable[[], None]] = {
        "bare": bare,
        "marks and sums": lambda: watched(read=False),
        "read at the end": lambda: watched(write=False),
        "written too: all of it": watched,
        "bare again (control)": bare,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with scheduled_garbage():  # as train.py has it
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
    drawn, every = redraw()
    over = statistics.median(a - b for a, b in zip(found["written too: all of it"], found["bare"], strict=True))
    whole = over + drawn / every * middle
    print(f"a redraw of the bars takes {1e3 * drawn:.1f} ms, every {every:.0f} s: {100 * drawn / every:.2f} %;"
          f" with the rest {whole:.1f} us a step, {100 * whole / middle:.2f} %")  # fmt: skip
    tracking.close()


def redraw() -> tuple[float, float]:
    """Seconds that one redraw of the bars takes, and between two of them."""
    with Display(console=Console(file=io.StringIO(), force_terminal=True, width=100)) as display:
        assert display.bars
        display.begin(lambda: 100, total=1000)
        display.figures(100, {"train/loss": 1.0, "train/samples_per_second": 1e4})
        took = []
        for _ in range(50):
            began = time.perf_counter()
            display.bars.refresh()
            took.append(time.perf_counter() - began)
        return statistics.median(took), 1 / display.bars.live.refresh_per_second


if __name__ == "__main__":
    main()
