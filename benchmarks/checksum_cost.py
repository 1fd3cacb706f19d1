"""Measure the cost of verifying the cached table of rows at a start, in seconds per GB; the limit
is 1.5.

    PYTHONPATH=src python benchmarks/checksum_cost.py [--rounds 5] [--gigabytes 1]

The control reads the same file without a checksum. Both alternate, with the file in the page cache.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

from oneloop.tasks.rows.cache import checksum_of


def plain(file: Path) -> None:
    with file.open("rb") as stream:
        while stream.read(1 << 22):
            pass


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--gigabytes", type=float, default=1.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, size = Path(folder) / "table.arrow", int(given.gigabytes * 1e9)
        with file.open("wb") as stream:
            for start in range(0, size, 1 << 22):
                stream.write(os.urandom(min(1 << 22, size - start)))
        times: dict[str, list[float]] = {"checksum": [], "read alone": []}
        for _ in range(given.rounds):
            for name, act in (("checksum", checksum_of), ("read alone", plain)):
                began = time.perf_counter()
                act(file)
                times[name].append((time.perf_counter() - began) / given.gigabytes)
    print(
        f"# {date.today()}  python benchmarks/checksum_cost.py --rounds {given.rounds} "
        f"--gigabytes {given.gigabytes:g}"
    )
    print(
        f"# {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        "seconds per GB"
    )
    for name, found in times.items():
        print(
            f"{name:12} median {statistics.median(found):.3f}  ({min(found):.3f} to "
            f"{max(found):.3f})"
        )


if __name__ == "__main__":
    main()
