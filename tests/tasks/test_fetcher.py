"""The process that fetches row groups: what it fetches, when, and how it ends."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import order_of
from oneloop.data.step_batches import CollateWithWeight, groups
from oneloop.tasks.rows.remote.data_sets import remote_found
from oneloop.tasks.rows.rows import Mapped
from remote_data import counted_s3
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.remote.fetcher",
    "oneloop.tasks.rows.remote.fetch_client",
    "oneloop.tasks.rows.remote.fetch_room",
    "oneloop.tasks.rows.remote.range_file",
)

ROWS = 32  # of a group
GROUPS = 200
WINDOW = 1  # megabytes: two lanes of ten groups; the host keeps 40 groups
BATCH = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Yield a bucket with two Parquet files, of whose columns one is not used."""
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    for part in range(2):
        numbers = np.arange(GROUPS * ROWS // 2) + part * GROUPS * ROWS // 2
        table = pyarrow.table(
            {
                "x": pyarrow.array([random.bytes(1500) for _ in numbers]),
                "unused": pyarrow.array([random.bytes(700) for _ in numbers]),
                "y": numbers,
            }
        )
        parquet.write_table(table, folder / f"train-{part}.parquet", row_group_size=ROWS)
    with counted_s3() as server:
        server.copy(folder, "s3://bucket/rows")
        yield server


def sample(row) -> int:
    return row["y"]


def collate(samples):
    return {"y": torch.tensor(samples)}


def weigh(batch):
    return torch.tensor(float(len(batch["y"])))


def read(workers: int, start: int, steps: int, wait: float = 0.0) -> dict:
    """Read some steps of this rank; return the numbers, and the largest size of the cache."""
    rows = Mapped(remote_found("s3://bucket/rows").rows(["x", "y"], window=WINDOW)["train"], sample)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    steps_of = groups(
        rows,
        CollateWithWeight(collate, weigh),
        order_of(rows, seed=1, batch=BATCH),
        BatchLayout(BATCH, ranks),
        rank=rank,
        seed=1,
        start=start,
        device=torch.device("cpu"),
        workers=workers,
    )
    read: list[list[int]] = []
    largest = 0
    for _ in range(steps):
        for batch in next(steps_of).batches:
            read.append(batch["y"].tolist())
        largest = max(largest, cached())
        time.sleep(wait)
    steps_of.close()
    return {"read": read, "largest": largest}


def cached() -> int:
    folder = Path(os.environ["ONELOOP_CACHE"]) / "row_groups"
    sizes = [0]
    for file in folder.rglob("*.arrow"):
        try:
            sizes.append(file.stat().st_size)
        except OSError:
            continue
    return sum(sizes)


def gone(cache: Path, seconds: float = 8.0) -> bool:
    """Return whether the fetcher and its folder go."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not [path for path in (cache / "row_groups").iterdir() if path.is_dir()]:
            return True
        time.sleep(0.1)
    return False


def chunks(store) -> list:
    """Return the requests for column chunks, and not for footers."""
    return [one for one in store.proxy.ranges("rows") if one.end - one.start < 60_000]


def variables(store, tmp_path) -> dict[str, str]:
    return {**store.variables, "ONELOOP_CACHE": str(tmp_path)}


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (2, 2),
        *(pytest.param(2, workers, marks=pytest.mark.slow) for workers in (0, 1, 3)),
    ],
)
def test_each_group_is_fetched_once(store, tmp_path, ranks, workers):
    steps = GROUPS * ROWS // BATCH
    store.proxy.seen.clear()
    world = run(
        read, workers, 0, steps, 0.01, ranks=ranks, variables=variables(store, tmp_path), timeout=60
    )
    results = world.ok()

    # The ranks have read each row once.
    rows = [number for result in results for batch in result["read"] for number in batch]
    assert sorted(rows) == list(range(GROUPS * ROWS))

    # What is waited for comes on top of two windows.
    budget = 2 * WINDOW * 2**20
    assert max(result["largest"] for result in results) < 1.1 * budget

    # One epoch was fetched once, and the first windows of the next. (Each group has two ranges.)
    ranges = Counter((one.name, one.start) for one in chunks(store))
    ahead = budget // (1500 * ROWS)
    assert len(ranges) == 2 * GROUPS
    assert sum(ranges.values()) <= 2 * (1.03 * GROUPS + ahead)
    assert gone(tmp_path)
