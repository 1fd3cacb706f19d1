"""Row groups that the processes of a host share: what is fetched, when, and what is left."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from oneloop.basics.bucket import StoreError
from oneloop.basics.exit_codes import BadInput
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import order_of
from oneloop.data.step_batches import CollateWithWeight, groups
from oneloop.tasks.rows.remote import row_group_cache
from oneloop.tasks.rows.remote.data_sets import remote_found
from oneloop.tasks.rows.remote.remote_file import RowGroup
from oneloop.tasks.rows.remote.row_group_cache import RowGroupCache
from oneloop.tasks.rows.rows import Mapped
from remote_data import counted_s3
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.remote.fetch_ahead",
    "oneloop.tasks.rows.remote.remote_file",
    "oneloop.tasks.rows.remote.row_group_cache",
)

ROWS = 16  # of a group, with one step
SIZE = 3000  # bytes of a row
GROUPS = 100
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
                "x": pyarrow.array([random.bytes(SIZE) for _ in numbers]),
                "unused": pyarrow.array([random.bytes(1400) for _ in numbers]),
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


def folders(cache: Path) -> list[Path]:
    """Return the folders of row groups in a cache."""
    return [path for path in (cache / "row_groups").iterdir() if path.is_dir()]


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
        read,
        workers,
        0,
        steps,
        0.01,
        ranks=ranks,
        variables=variables(store, tmp_path),
        timeout=120,
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
    ahead = budget // (SIZE * ROWS)
    assert len(ranges) == 2 * GROUPS
    assert sum(ranges.values()) <= 2 * (1.03 * GROUPS + ahead)
    assert not folders(tmp_path)


@pytest.mark.slow
def test_a_resume_fetches_two_windows(store, tmp_path):
    """In mid-epoch, no row group is fetched that was needed only before."""
    store.proxy.seen.clear()
    middle = GROUPS * ROWS // 2 + 3 * BATCH
    world = run(read, 0, middle, 1, ranks=2, variables=variables(store, tmp_path))
    assert len(world.ok()) == 2 and not folders(tmp_path)
    fetched = sum(one.end - one.start for one in chunks(store))
    assert 0 < fetched < 1.1 * 2 * WINDOW * 2**20


def read_and_be_killed(workers: int) -> None:
    """Read until the process is killed, some steps after the first row group has come."""

    def kill() -> None:
        while not cached():
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    read(workers, 0, 5000, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_killed_leaves_what_the_next_one_removes(
    store, tmp_path, monkeypatch, workers
):
    world = run(read_and_be_killed, workers, variables=variables(store, tmp_path))
    assert world.codes == [-signal.SIGKILL]
    assert folders(tmp_path)
    # The next run on this host removes what is left.
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path))
    cache = RowGroupCache("s3://bucket/other", ["x"], 1)
    assert len(folders(tmp_path)) == 1
    del cache
    assert not folders(tmp_path)


def read_two(number: int) -> list[int]:
    return [number for batch in read(0, 0, 40)["read"] for number in batch]


@pytest.mark.slow
def test_two_runs_on_a_host_have_their_own_groups(store, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        both = list(
            threads.map(
                lambda number: run(read_two, number, variables=variables(store, tmp_path)).ok()[0],
                range(2),
            )
        )
    assert both[0] == both[1] and len(both[0]) == 40 * BATCH
    assert not folders(tmp_path)


class Group:
    """Stands for a remote file whose only row group has some bytes."""

    def __init__(self, name: str, size: int, error: Exception | None = None) -> None:
        self.where = name
        self.reads = 0
        self.error = error
        self.row_group = RowGroup(self, 0, name, size)

    def read(self, group, columns, *, on_retry=None):
        self.reads += 1
        if self.error is not None:
            raise self.error
        return pyarrow.table({"x": pyarrow.array([bytes(self.row_group.size)])})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty cache of 100 kB."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path))
    return RowGroupCache("s3://bucket", ["x"], 100_000)


def test_the_farthest_use_makes_room(cache):
    sizes = {"a": 20_000, "b": 38_000, "c": 38_000, "d": 38_000, "e": 90_000}
    spare, late, soon, middle, last = [Group(*item).row_group for item in sizes.items()]
    for group in (spare, late, soon):
        cache.read(group)
    assert cache.claim("two", {late: 50}) == []
    # All that is there is needed before the last one.
    assert cache.claim("one", {soon: 5, last: 60}) == [] and cache.keeps(spare)
    assert cache.claim("one", {soon: 5, middle: 10}) == [middle]
    assert [cache.keeps(group) for group in (spare, late, soon)] == [False, False, True]

    # A group that a process will make has its room.
    assert cache.claim("two", {middle: 10}) == []
    cache.release(middle)
    assert cache.claim("two", {middle: 10}) == [middle]


def test_a_rank_does_not_use_the_room_of_others(cache, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    groups = [Group(name, 30_000).row_group for name in "abc"]
    assert cache.claim("one", dict.fromkeys(groups, 1)) == groups[:1]
    # What both need counts half for each.
    assert cache.claim("two", dict.fromkeys(groups, 1)) == groups[1:]


def test_few_groups_that_no_plan_needs_are_kept(cache):
    groups = [Group(f"{number}", 30_000).row_group for number in range(8)]
    for number, group in enumerate(groups):
        cache.read(group)
        assert cache.keeps(group)
        assert sum(map(cache.keeps, groups)) == min(4, number + 1)


def test_one_process_tries_for_all_that_wait(cache):
    """A try may take minutes, and several processes may wait for the same group."""
    error = StoreError("s3://bucket/x: no answer")
    slow = Group("a", 10, error)
    entered, ends = threading.Event(), threading.Event()

    def read(*given, on_retry):
        on_retry(1, StoreError("status 503"))
        entered.set()
        ends.wait(60)
        return Group.read(slow, *given)

    slow.read = read
    with ThreadPoolExecutor(3) as threads:
        several = [threads.submit(cache.read, slow.row_group) for _ in range(3)]
        assert entered.wait(60)
        time.sleep(1.5)
        assert cache.waits() == ", which waits for a, row group 0 (try 2, after status 503)"
        ends.set()
        for one in several:
            with pytest.raises(StoreError, match="no answer"):
                one.result(60)
    assert slow.reads == 1 and not cache.waits()

    # A later try may succeed.
    slow.error = None
    assert cache.read(slow.row_group).num_rows == 1


def test_a_full_disk_is_one_message(cache, monkeypatch):
    def write(file, table):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_group_cache, "_write", write)
    with pytest.raises(BadInput, match="cannot be written .No space.*; a row group has .*window"):
        cache.read(Group("a", 10).row_group)
