"""Measure the memory of the data worker that reads samples for the checks, with 1 GB of data.

    python benchmarks/reader_memory.py

The data set is one tensor in memory, and its samples are views of it. Printed are, in MB: the
memory of the process before the worker starts and after it has ended (RSS), what the worker alone
occupies while it reads 16 samples (private memory), and the bytes of the answer. The control reads
them in the same process.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from oneloop.data.sample_reader import _pickled, sample_reader
from oneloop.data.seeded_samples import SeededSamples

ROWS = 1 << 18
WIDTH = 1024


def memory(*kinds: str) -> float:
    """Return the sum of these kinds of memory of this process, in MB."""
    found = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in kinds:
            found += int(rest.split()[0])
    return found / 1024


class Rows:
    """One tensor of 1 GB."""

    def __init__(self) -> None:
        self.values = torch.ones(ROWS, WIDTH)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def main() -> None:
    torch.set_num_threads(1)
    data = Rows()
    keyed = SeededSamples(data, seed=0)
    print(f"data: {data.values.nbytes / 2**20:,.0f} MB")

    def load() -> tuple[list[tuple[int, torch.Tensor]], float]:
        samples = [keyed[0, index * (ROWS // 16)] for index in range(16)]
        return samples, memory("Private_Dirty", "Private_Clean")

    for workers in (1, 0, 1, 0):
        before = memory("Rss")
        start = time.perf_counter()
        with sample_reader(load, workers=workers) as read:
            samples, private = read()
        seconds = time.perf_counter() - start
        own = f"{private:7,.1f} MB of its own" if workers else "-"
        print(
            f"workers {workers}: process {before:,.1f} MB before, {memory('Rss'):,.1f} after; "
            f"worker {own}; answer {len(_pickled(samples)) / 2**20:.2f} MB; {seconds:.2f} s"
        )
        assert all(torch.equal(sample, data[index]) for index, sample in samples)


if __name__ == "__main__":
    main()
