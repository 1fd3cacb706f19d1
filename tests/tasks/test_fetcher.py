"""The process that fetches row groups: what it fetches, when, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
import torch
from filelock import FileLock
from pyarrow import parquet

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import order_of
from oneloop.data.step_batches import CollateWithWeight, groups
from oneloop.tasks.rows.remote import handshake
from oneloop.tasks.rows.remote.data_sets import remote_found
from oneloop.tasks.rows.remote.fetch_client import connected
from oneloop.tasks.rows.rows import Mapped
from remote_data import counted_s3
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.remote.fetcher",
    "oneloop.tasks.rows.remote.fetch_client",
    "oneloop.tasks.rows.remote.fetch_room",
    "oneloop.tasks.rows.remote.handshake",
    "oneloop.tasks.rows.remote.range_file",
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


def gone(cache: Path, seconds: float = 120.0) -> bool:
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
    assert gone(tmp_path)


@pytest.mark.slow
def test_a_resume_fetches_two_windows(store, tmp_path):
    """In mid-epoch, no row group is fetched that was needed only before."""
    store.proxy.seen.clear()
    middle = GROUPS * ROWS // 2 + 3 * BATCH
    world = run(read, 0, middle, 1, ranks=2, variables=variables(store, tmp_path))
    assert len(world.ok()) == 2 and gone(tmp_path)
    fetched = sum(one.end - one.start for one in chunks(store))
    assert 0 < fetched < 1.1 * 2 * WINDOW * 2**20


def test_nobody_waits_for_a_peer_that_says_nothing(tmp_path, monkeypatch):
    """It may be a stranger at the port of a fetcher, or another program at the port of an earlier
    one."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(handshake, "SECONDS", 3)
    run, folder = "a" * 16, tmp_path / "row_groups"
    pointer = folder / f"{run}.json"
    (folder / "earlier").mkdir(parents=True)
    (folder / "earlier" / "key").write_bytes(b"key")

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(2) as threads:
        about = {"folder": str(folder / "earlier"), "port": silent.getsockname()[1]}
        pointer.write_text(json.dumps(about))
        first = threads.submit(connected, run)

        # While this process waits for an answer, other runs can start a fetcher.
        with silent.accept()[0], FileLock(folder / "fetchers.lock", timeout=120):
            pass
        with first.result(120):
            # A new fetcher has taken its place. Beside a stranger, it answers.
            port = json.loads(pointer.read_text())["port"]
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"\0")
                threads.submit(connected, run).result(120).close()
    assert gone(tmp_path)


def fetchers(cache: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "oneloop.tasks.rows.remote.fetcher" in words and str(cache) in words[-1]:
            found.append(process)
    return found


def killed_in_a_thread(workers: int) -> str:
    def kill() -> None:
        while not fetchers(Path(os.environ["ONELOOP_CACHE"])):
            time.sleep(0.05)
        time.sleep(1.0)
        for process in fetchers(Path(os.environ["ONELOOP_CACHE"])):
            process.kill()

    threading.Thread(target=kill, daemon=True).start()
    try:
        read(workers, 0, 2000, 0.02)
    except Exception as error:
        return f"{error} {error.__cause__}"
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fetcher_that_is_killed_ends_the_run(store, tmp_path, workers):
    words = run(killed_in_a_thread, workers, variables=variables(store, tmp_path)).ok()[0]
    assert "the process that fetches row groups has ended" in words


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
def test_a_run_that_is_killed_leaves_no_fetcher(store, tmp_path, workers):
    world = run(read_and_be_killed, workers, variables=variables(store, tmp_path))
    assert world.codes == [-signal.SIGKILL]
    assert gone(tmp_path)
    assert not fetchers(tmp_path)


def read_two(number: int) -> list[int]:
    return [number for batch in read(0, 0, 40)["read"] for number in batch]


@pytest.mark.slow
def test_two_runs_on_a_host_have_their_own_fetchers(store, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        both = list(
            threads.map(
                lambda number: run(read_two, number, variables=variables(store, tmp_path)).ok()[0],
                range(2),
            )
        )
    assert both[0] == both[1] and len(both[0]) == 40 * BATCH
    assert gone(tmp_path)
