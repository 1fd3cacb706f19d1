"""Measure the host's cost of a step of data with oneloop.Loader, beside torch's DataLoader.

    python benchmarks/loader_cost.py [--steps 400] [--repeats 9]

The data set is in memory: 10,000 samples of 64 float32 numbers and a label; a batch has 64 samples.
Each loop only takes the batches: no model. The loaders alternate, and each repeat is one loop over
``steps`` batches after 20 others. A control is the DataLoader again.

- ``accelerate`` is a DataLoader with ``shuffle``, prepared by Accelerate.
- ``augmented`` draws random numbers in each sample (noise of torch, a flip of Python).
- ``of 4,096`` is the loader of rank 2,048 of 4,096 processes, with as many samples of its own: the
  ratio to one process is the cost of the number of processes (order and layout).
"""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from itertools import chain, repeat
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from oneloop import Loader

BATCH = 64
WARM = 20  # batches before the clock starts
Sample = tuple[Tensor, int]


class Augmented:
    """Samples with noise and a random flip."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        x, y = self.samples[index]
        x = x + 0.1 * torch.randn(64)
        if random.random() < 0.5:
            x = x.flip(0)
        return x, y


def data_loader(dataset: Any, workers: int) -> Iterator[Any]:
    accelerator = Accelerator(cpu=True)
    loading = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    prepared = accelerator.prepare(loading)
    return chain.from_iterable(repeat(prepared))


def loader(dataset: Any, workers: int, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
    made = Loader(dataset, BATCH * ranks, workers=workers, rank=rank, ranks=ranks, device="cpu")
    for group in made:
        yield from group


def seconds(batches: Iterator[Any], steps: int) -> float:
    """Return the seconds per batch."""
    for _ in range(WARM):
        next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return (time.perf_counter() - began) / steps


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=400)
    words.add_argument("--repeats", type=int, default=9)
    options = words.parse_args()
    torch.set_num_threads(1)
    print(f"# {date.today()}  python {shlex.join(sys.argv)}")
    print(
        f"# torch {torch.__version__}, accelerate {accelerate.__version__}, Python "
        f"{platform.python_version()}, batch {BATCH}, one thread"
    )

    samples = [(torch.randn(64), number % 10) for number in range(10_000)]
    augmented = Augmented(samples)
    cases: dict[str, tuple[Any, dict[str, Callable[[], Iterator[Any]]]]] = {}
    for name, dataset in {"plain": samples, "augmented": augmented}.items():
        for workers in (0, 2):
            cases[f"{name}, {workers} workers"] = {
                "accelerate": lambda d=dataset, w=workers: data_loader(d, w),
                "control": lambda d=dataset, w=workers: data_loader(d, w),
                "Loader": lambda d=dataset, w=workers: loader(d, w),
            }
    cases["plain, of 4,096"] = {
        "one process": lambda: loader(samples, 0),
        "control": lambda: loader(samples, 0),
        "of 4,096": lambda: loader(samples, 0, 2048, 4096),
    }

    for case, kinds in cases.items():
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(options.repeats):
            for name, make in kinds.items():
                batches = make()
                found[name].append(1e6 * seconds(batches, options.steps))
                del batches
        base = statistics.median(next(iter(found.values())))
        print(f"\n{case}: us per batch")
        for name, values in found.items():
            middle = statistics.median(values)
            ratios = [one / other for one, other in zip(values, next(iter(found.values())))]
            print(
                f"  {name:12} {middle:8.1f}  ({min(values):.1f} to {max(values):.1f}), "
                f"{middle - base:+8.1f}, ratio {statistics.median(ratios):.3f}"
            )


if __name__ == "__main__":
    main()
