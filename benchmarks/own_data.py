"""Measure what reading Parquet in windows costs, and how well it shuffles.

    python benchmarks/own_data.py [--megabytes 60]

Writes rows of 1 KB to 40 files in a temporary folder, in row groups of 100 rows. Then it measures:

- reads: row groups that all processes read in one epoch, divided by the row groups that exist.
  Ranks and workers share the steps of batch 64 in micro-batches of 8, with lanes (as in a run) and
  without; then the same of a mixture;
- shuffling: the mean distance of neighbours, divided by that of a full permutation, by row groups
  in the window;
- speed: rows per second in one process, in the order of a run, in the order on disk, and from
  `datasets`' memory-mapped arrow of the same rows in a full permutation; rounds alternate;
- memory: the peak of anonymous memory above the imports, by window, of a process that reads one
  epoch.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import numpy as np
import pyarrow
from pyarrow import parquet

from oneloop.data.order import Order, Ordered
from oneloop.tasks.rows.find_files import found
from oneloop.tasks.rows.mixture import Mixture
from oneloop.tasks.rows.parquet import Parquet
from oneloop.tasks.rows.parquet_files import LocalFile
from oneloop.tasks.rows.row_group_order import Windows

BATCH, MICRO, GROUP, FILES = 64, 8, 100, 40


def written(folder: Path, megabytes: int) -> None:
    draw, each = np.random.default_rng(0), megabytes * 1000 // FILES
    for number in range(FILES):
        noise = draw.integers(97, 123, (each, 950), dtype=np.uint8)
        table = pyarrow.table(
            {"text": [row.tobytes().decode() for row in noise], "id": range(each)}
        )
        parquet.write_table(
            table, folder / f"part-{number:03d}.parquet", row_group_size=GROUP, compression="none"
        )


def rows_of(folder: Path, window: int) -> Parquet:
    there = found(folder)
    files = [LocalFile(file, there.root) for file in there.files]
    return Parquet(files, there.root, ["text", "id"], window=window, content={})


def shares(order: Ordered, size: int, ranks: int, workers: int) -> Iterator[list[int]]:
    """Yield the indices that each process loads in an epoch, divided as in a run."""
    steps = np.arange(size // BATCH)[:, None]
    for rank in range(ranks):
        share = BATCH // ranks
        own = order.at(steps * BATCH + rank * share + np.arange(share)[None, :])[1].reshape(
            -1, MICRO
        )
        for worker in range(max(1, workers)):
            yield own[worker :: max(1, workers)].reshape(-1).tolist()


def reads(folder: Path, window: int, ranks: int, workers: int, *, lanes: bool) -> float:
    total = 0
    rows = rows_of(folder, window)
    order = rows.order(seed=0, batch=BATCH if lanes else 1)
    for indices in shares(order, len(rows), ranks, workers):
        own = rows_of(folder, window)
        for index in indices:
            own[index]
        total += own.reads
    return total / len(rows.sizes)


def mixture_reads(folder: Path, window: int, ranks: int, batch: int) -> float:
    """Return groups read by all ranks / groups, of two sets (70 %, 30 %) in an epoch of the first.

    ``batch``: samples of a step, for the order; 1: an order without lanes.
    """
    first = rows_of(folder, window)
    mixture = Mixture({"a": first, "b": rows_of(folder, window)}, [0.7, 0.3])
    order = mixture.order(seed=0, batch=batch)
    total = 0
    for indices in shares(order, int(len(first) / 0.7), ranks, 0):
        own = [rows_of(folder, window), rows_of(folder, window)]
        for index in indices:
            own[index // len(first)][index % len(first)]
        total += sum(rows.reads for rows in own)
    # the second set is in its first epoch, at 3 / 7
    return total / (len(first.sizes) * (1 + 3 / 7))


def distance(rows: int, held: int) -> float:
    order = Windows([GROUP] * (rows // GROUP), seed=0, open_groups=held, batch=BATCH)
    return float(np.abs(np.diff(order[0 : order.size][1])).mean() / (order.size / 3))


def speed(row: Callable[[int], object], indices: list[int]) -> float:
    began = time.perf_counter()
    for index in indices:
        row(index)
    return len(indices) / (time.perf_counter() - began)


def memory(folder: str, window: int) -> None:
    """Print the peak memory in megabytes, in a separate process."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = most = anonymous()
    rows = rows_of(Path(folder), window)
    for number, index in enumerate(rows.order(seed=0, batch=BATCH)[0 : len(rows)][1].tolist()):
        rows[index]
        if number % 500 == 0:
            most = max(most, anonymous())
    print((most - before) / 1024)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--megabytes", type=int, default=60)
    options.add_argument("--memory", nargs=2)
    asked = options.parse_args()
    if asked.memory:
        return memory(asked.memory[0], int(asked.memory[1]))
    print(f"{date.today()}  python {' '.join(sys.argv)}")
    print(
        f"Python {platform.python_version()}, pyarrow {pyarrow.__version__}, datasets "
        f"{datasets.__version__},",
        end=" ",
    )
    print(f"{os.cpu_count()} cores, {asked.megabytes} MB in {FILES} files, groups of {GROUP} rows")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "rows"
        folder.mkdir()
        written(folder, asked.megabytes)
        window = max(2, asked.megabytes // 6)
        about = rows_of(folder, window)
        print(
            f"\nreads / groups ({len(about.sizes)} groups, window {window} MB: "
            f"{about.open_groups} groups)"
        )
        print("ranks workers  with lanes  without")
        for ranks in (1, 2, 4):
            for workers in (0, 2):
                both = [
                    reads(folder, window, ranks, workers, lanes=lanes) for lanes in (True, False)
                ]
                print(f"{ranks:5} {workers:7} {both[0]:11.2f} {both[1]:8.2f}")
        print("\nthe same of a mixture of two sets, 70 % and 30 %, without workers")
        for ranks in (1, 2, 4):
            both = [mixture_reads(folder, window, ranks, batch) for batch in (BATCH, 1)]
            print(f"{ranks:5} {'':7} {both[0]:11.2f} {both[1]:8.2f}")
        print("\ndistance of neighbours / that of a full permutation, by groups in the window")
        for held in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            print(f"{held:5} {distance(len(about), held):6.3f}")
        timed(folder, about, Path(name) / "cache")
        print("\npeak of anonymous memory above the imports")
        for window in (4, 16, 64, 256):
            output = subprocess.run(
                [sys.executable, __file__, "--memory", str(folder), str(window)],
                capture_output=True,
                text=True,
                check=True,
            )
            print(f"window {window:4} MB: {float(output.stdout):6.0f} MB")
    return None


def timed(folder: Path, about: Parquet, cache: Path) -> None:
    datasets.disable_progress_bars()
    mapped = datasets.load_dataset(
        "parquet", data_files=str(folder / "*"), split="train", cache_dir=str(cache)
    )
    count = min(20_000, len(about))
    orders = {
        "in windows, of parquet": about.order(seed=0, batch=BATCH)[0:count][1].tolist(),
        "as on disk, of parquet": list(range(count)),
        "a full permutation, of arrow": Order(len(about), seed=0)[0:count][1].tolist(),
    }
    found: dict[str, list[float]] = {name: [] for name in orders}
    for _ in range(7):
        for name, indices in orders.items():
            row = (
                mapped.__getitem__ if "arrow" in name else rows_of(folder, about.window).__getitem__
            )
            found[name].append(speed(row, indices))
    print(f"\nrows a second, one process ({count} rows, 7 rounds: median, least, most)")
    for name, each in found.items():
        print(f"{name:30} {statistics.median(each):8,.0f} {min(each):8,.0f} {max(each):8,.0f}")


if __name__ == "__main__":
    main()
