"""What all watching costs of a step of about 5 ms: marks of the clock, sums of the meter, a log line every ten steps.

    python benchmarks/watching_cost.py

One process on a CPU. Rounds alternate: a bare step, the same watched, the bare one again (control).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
from accelerate import Accelerator
from torch import nn

from oneloop.watch.meter import Meter


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--pairs", type=int, default=8)
    given = asked.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(192, 256)
    meter = Meter(accelerator, list(model.parameters()), flops=1e6, peak=1e11)

    def bare(step: int) -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def watched(step: int) -> None:
        meter.clock.mark("data")
        loss = model(x).square().mean()
        loss.backward()
        meter.clock.mark("compute")
        if step % 10 == 0:
            meter.before_update()
        optimizer.step()
        optimizer.zero_grad()
        meter.clock.mark("update")
        meter.clock.step()
        meter.step(loss=loss.detach(), weight=192.0, samples=192, norm=loss.detach())
        if step % 10 == 0:
            meter.read()

    def timed(act: Callable[[int], None]) -> float:
        began = time.perf_counter()
        for step in range(1, given.steps + 1):
            act(step)
        return (time.perf_counter() - began) / given.steps * 1e6

    found: dict[str, list[float]] = {"bare": [], "watched": [], "bare again (control)": []}
    for turn in range(given.pairs + 1):
        for name, act in zip(found, (bare, watched, bare), strict=True):
            took = timed(act)
            if turn:
                found[name].append(took)
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread, {given.steps} steps,"
          f" {given.pairs} rounds; microseconds per step")  # fmt: skip
    for name, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found["bare"], strict=True))
        print(
            f"{name:22} median {statistics.median(times):8.1f}   min {min(times):8.1f}   max {max(times):8.1f}   {ratio:.4f}x"
        )


if __name__ == "__main__":
    main()
