"""Measure all logging in a step of about 5 ms. Every step: clock marks and sums of the meter. Every
fiftieth step (the default of log.every): update ratio, read-out, a line in metrics.jsonl,
TensorBoard, the terminal, advice.

    python benchmarks/watching_cost.py

One process on a CPU. Machine noise exceeds 1 %, so single steps alternate: bare, logged, bare
(control), in a new order each turn. The result is the median difference to the bare step of the
same turn, with the 95 % interval of that median. The work of the fiftieth step is timed separately,
after a step and with cold caches; so is how much longer the next step takes, in which TensorBoard's
thread writes the line. A redraw of the bars, once per second in a separate thread, is timed and
added as if nothing overlapped it. Python's garbage is not collected, as in
train.py between two of its collections. glibc is set to keep freed memory: otherwise it
returns and requests memory in phases that small allocations shift, by more than the measured
effect.
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

from oneloop.machine.torch_settings import scheduled_garbage
from oneloop.measure.meter import Meter
from oneloop.show.terminal import Display
from oneloop.show.tracking import Tracking

EVERY = 50  # steps between two log lines of a long run with log.every auto


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--turns", type=int, default=12000)
    asked.add_argument("--rows", type=int, default=160, help="of a batch: how long a step takes")
    given = asked.parse_args()
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        kept = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | kept)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        measure(given.turns, given.rows, Path(scratch))


def measure(turns: int, rows: int, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(rows, 256)
    meter = Meter(accelerator, list(model.parameters()), flops=1e6, peak=1e11)
    tracking = Tracking(accelerator, folder, project="cost", config={})
    done = 0
    display = Display(console=Console(file=io.StringIO()))
    display.begin(lambda: done, total=10**9)
    norm = torch.tensor(1.0)
    logged: list[float] = []

    def bare() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.detach()  # as train.py does for its guard

    def watched(log: bool = False) -> None:
        nonlocal done
        meter.clock.mark("data")
        meter.clock.mark("other")
        meter.clock.mark("transfer")
        loss = model(x).square().mean()
        loss.backward()
        meter.clock.mark("compute")
        before = seconds(meter.before_update) if log else 0.0
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        meter.step(loss=value, weight=160.0, samples=160, norm=norm)
        meter.clock.lap("update")
        done += 1
        if log:
            logged.append(before + seconds(write))

    def write() -> None:
        values = meter.read()
        tracking.log({"step": done, "samples": 160 * done, "time": 1.0, "train/lr": 1e-4, **values})
        display.metrics(done, values)

    kinds = {"bare": bare, "watched": watched, "control": bare}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    after: list[float] = []
    with scheduled_garbage():  # as in train.py
        for turn in range(-100, turns):
            took = {
                name: seconds(kinds[name])
                for name in random.Random(turn).sample(list(kinds), len(kinds))
            }
            for name, one in took.items() if turn >= 0 else ():
                found[name].append(one)
            if turn % EVERY == EVERY - 1:
                watched(log=True)
                after.append(seconds(bare) - seconds(bare))
    drawn, pause = redraw()
    middle = statistics.median(found["bare"])
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, 1 thread,"
        f" {turns} turns of three steps, {len(logged)} lines, one every {EVERY} steps"
    )
    print(
        f"a bare step {middle:.0f} us; microseconds per step over it, with the 95 % interval "
        "of the median:"
    )
    parts = {
        "marks and sums, every step": over(found["watched"], found["bare"], 1),
        "update ratio, read, line, terminal": over(logged[2:], [0.0] * len(logged[2:]), EVERY),
        "the step after these takes longer": over(after, [0.0] * len(after), EVERY),
        f"a redraw of the bars every {pause:.0f} s": [drawn / 1e6 / pause * middle] * 3,
    }
    for name, (value, low, high) in parts.items():
        print(f"  {name:36} {value:6.1f} ({low:.1f} to {high:.1f})")
    value, low, high = (sum(column) for column in zip(*parts.values(), strict=True))
    print(
        f"  {'all of it':36} {value:6.1f} ({low:.1f} to {high:.1f}),"
        f" of 5 ms {value / 50:.2f} % ({low / 50:.2f} to {high / 50:.2f})"
    )
    value, low, high = over(found["control"], found["bare"], 1)
    print(f"  {'control: bare over bare':36} {value:6.1f} ({low:.1f} to {high:.1f})")
    tracking.close()


def seconds(act: Callable[[], object]) -> float:
    """Return the duration of a call in microseconds."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e6


def over(these: list[float], those: list[float], steps: int) -> list[float]:
    """Return the median difference per step in microseconds, and its 95 % interval by ranks."""
    ordered = sorted((a - b) / steps for a, b in zip(these, those, strict=True))
    middle, reach = len(ordered) // 2, round(0.98 * math.sqrt(len(ordered)))
    return [
        statistics.median(ordered),
        ordered[max(0, middle - reach)],
        ordered[min(len(ordered) - 1, middle + reach)],
    ]


def redraw() -> tuple[float, float]:
    """Return the microseconds of one redraw of the bars, and the seconds between two redraws."""
    with Display(console=Console(file=io.StringIO(), force_terminal=True, width=100)) as display:
        assert display.bars
        display.begin(lambda: 100, total=1000)
        display.metrics(100, {"train/loss": 1.0, "train/samples_per_second": 1e4})
        took = statistics.median(seconds(display.bars.refresh) for _ in range(50))
        return took, 1 / display.bars.live.refresh_per_second


if __name__ == "__main__":
    main()
