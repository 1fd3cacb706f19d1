"""Measure the cost of random samples (goal C11): a data set without randomness, or with torch,
Python or numpy.

    python benchmarks/sample_cost.py

For micro-batches of 1, 8 and 64: microseconds per batch of the bare data set, of the same through
`SeededSamples`, and with all three generators seeded for every sample, as oneloop once did by
default. Rounds alternate. Worker processes run the same code, next to the training process.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from oneloop.data.seeded_samples import SeededSamples

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: torch.rand(()).item(),
    "Python": random.random,
    "numpy": np.random.random,
}


class Points:
    """A data set in memory."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.x = list(torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)))
        self.draw = draw

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return self.x[index], self.draw()


def microseconds(
    load: Callable[[list[tuple[int, int]]], object], micro: int, batches: int
) -> float:
    places = [[(0, (number * micro + at) % 4096) for at in range(micro)] for number in range(64)]
    load(places[0])
    began = time.perf_counter()
    for number in range(batches):
        load(places[number % 64])
    return (time.perf_counter() - began) / batches * 1e6


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--rounds", type=int, default=8)
    given = asked.parse_args()
    torch.set_num_threads(1)
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, 1 thread,"
        f" {given.rounds} rounds; microseconds per batch, medians; in brackets what a sample "
        "pays over the bare set"
    )
    for name, draw in DRAWS.items():
        for micro in (1, 8, 64):
            dataset = Points(draw)
            keyed = SeededSamples(dataset, seed=0)
            ways = {
                "bare": lambda places, dataset=dataset: [dataset[index] for _, index in places],
                "keyed": lambda places, keyed=keyed: keyed.batch(places, list),
                "seeding always": lambda places, keyed=keyed: [keyed[place] for place in places],
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(given.rounds + 1):
                for way, load in ways.items():
                    took = microseconds(load, micro, max(50, 4000 // micro))
                    if turn:
                        times[way].append(took)
            middle = {way: statistics.median(values) for way, values in times.items()}
            paid = {way: (middle[way] - middle["bare"]) / micro for way in ways}
            shown = [
                f"{way} {middle[way]:7.1f} ({paid[way]:+.2f})"
                for way in ("keyed", "seeding always")
            ]
            print(
                f"draws {name:8} micro-batch {micro:3}   bare {middle['bare']:7.1f}   "
                f"{'   '.join(shown)}"
            )


if __name__ == "__main__":
    main()
