"""Measure samples per second, and waits for data, of rows that are read over a slow network.

    python benchmarks/data_anywhere.py [--rounds 3] [--latency 0 50 200] [--quick]

Writes texts of 4 kB to 12 Parquet files in row groups of 500 rows (2 MB), and serves them on
127.0.0.1, with these milliseconds before each answer and 50 MB/s for all answers together. One
process with two data workers reads an epoch in batches of 64, which the task text_classification
collates; there is no model. Then it reads with a pause of 100 ms after each batch, as a step would
take, and sums up the waits for the next batch. The readers, which alternate, are:

- oneloop: the loader and the plan of a run, with task.window 24 (MB);
- datasets: load_dataset("parquet", streaming=True) with its defaults for ranges, without shuffling
  (--shuffle: by shuffle(), with its default buffer of 1,000 rows), and torch's DataLoader. Its
  batches are made by the same functions;
- disk and control: oneloop on the files themselves, twice.

Each reader is a new process with an empty cache. Printed are the medians, and the least and most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import datasets
import numpy as np
import pyarrow
import torch
from pyarrow import parquet

FILES, GROUPS, ROWS, TEXT = 12, 3, 500, 4000
BATCH, WORKERS, WINDOW = 64, 2, 24
RATE = 50e6  # bytes per second
STEP = 0.1  # seconds
STEPS = 40  # with a pause


def write(folder: Path, files: int) -> int:
    """Write the files; return their bytes."""
    draw = np.random.default_rng(0)
    schema = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    ).arrow_schema
    folder.mkdir()
    for number in range(files + 1):
        name = f"train-{number:03d}" if number < files else "validation"
        count = GROUPS * ROWS if number < files else ROWS
        noise = draw.integers(97, 123, (count, TEXT), dtype=np.uint8)
        columns = {
            "text": [row.tobytes().decode() for row in noise],
            "label": draw.integers(0, 2, count),
        }
        table = pyarrow.table(columns, schema=schema)
        file = folder / f"{name}.parquet"
        parquet.write_table(table, file, row_group_size=ROWS, compression="none")
    return sum(file.stat().st_size for file in folder.iterdir())


def serve(folder: Path, latency: float) -> None:
    """Serve a folder until the standard input closes; print the address."""
    from remote_data import Files
    from stores import Proxy

    files = Files(folder)
    files.list()
    proxy = Proxy(files.address)
    proxy.latency, proxy.download_rate = latency, RATE
    print(proxy.address, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        time.sleep(1)


@contextmanager
def server(folder: Path, latency: float) -> Iterator[str]:
    """Start the server in another process; yield its address."""
    words = [sys.executable, __file__, "--serve", str(folder), "--latency", str(latency)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def text_task(where: str) -> Any:
    from oneloop.tasks.text_classification import TextClassification

    return TextClassification(data=where, length=256, window=WINDOW)


def by_oneloop(where: str) -> Iterable[Any]:
    """Return the batches of a run."""
    from oneloop.data.batch_layout import BatchLayout
    from oneloop.data.order import order_of
    from oneloop.data.step_batches import CollateWithWeight, groups

    task = text_task(where)
    rows = task.train_set()
    return groups(
        rows,
        CollateWithWeight(task.collate, task.weight),
        order_of(rows, seed=0, batch=BATCH),
        BatchLayout(BATCH, 1),
        rank=0,
        seed=0,
        start=0,
        device=torch.device("cpu"),
        workers=WORKERS,
    )


def by_datasets(where: str, disk: str, *, shuffle: bool) -> Iterable[Any]:
    """Return the batches of ``datasets``, collated by the functions of the task."""
    base = where.rpartition("/")[0]
    names = [file.name for file in sorted(Path(disk).glob("train-*.parquet"))]
    files = {"train": [f"{base}/{name}" for name in names]}
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    if shuffle:
        rows = rows.shuffle(seed=0)
    task = text_task(disk)

    def collate(batch: list[dict[str, Any]]) -> Any:
        made = task.collate([(task.reader.encode(row["text"]), row["label"]) for row in batch])
        return made, task.weight(made)

    # Begin again at the end, as a run does.
    while True:
        yield from torch.utils.data.DataLoader(
            rows,
            batch_size=BATCH,
            num_workers=WORKERS,
            collate_fn=collate,
        )


def read(kind: str, where: str, disk: str, batches: int, steps: int) -> None:
    """Print the measurements of one reader as JSON."""

    def opened() -> Iterator[Any]:
        if kind == "oneloop":
            return iter(by_oneloop(where))
        return iter(by_datasets(where, disk, shuffle=kind == "shuffled"))

    start = time.perf_counter()
    iterator = opened()
    use(next(iterator))
    first = time.perf_counter() - start
    for _ in range(batches - 1):
        use(next(iterator))
    seconds = time.perf_counter() - start
    del iterator

    # Wait for the first batch, which a run does before its first step.
    iterator = opened()
    use(next(iterator))
    waits = []
    for _ in range(steps):
        time.sleep(STEP)
        start = time.perf_counter()
        use(next(iterator))
        waits.append(time.perf_counter() - start)
    made = {"first": first, "rate": batches * BATCH / seconds, "wait": sum(waits) / steps}
    print(json.dumps({**made, "longest": max(waits)}), flush=True)
    os._exit(0)


def use(group: Any) -> None:
    """Take the micro-batches of a step of oneloop; a batch of ``datasets`` is there already."""
    if not isinstance(group, (list, tuple)):
        for _ in group.batches:
            pass


def measured(kind: str, where: str, disk: Path, batches: int, steps: int) -> dict[str, float]:
    """Run one reader in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        root = str(Path(__file__).parents[1] / "src")
        paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "ONELOOP_CACHE": f"{cache}/oneloop", "HF_HOME": f"{cache}/hf"}
        words = [sys.executable, __file__, "--read", kind, where, str(disk)]
        words += [str(batches), str(steps)]
        # Its data workers inherit the output, and may outlive it: a pipe would not close.
        output, errors = Path(cache, "output"), Path(cache, "errors")
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                words,
                env={**variables, "PYTHONPATH": paths},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code = process.wait(300)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            raise SystemExit(f"{kind} failed:\n{errors.read_text()}")
        found: dict[str, float] = json.loads(output.read_text().splitlines()[-1])
        return found


def line(name: str, found: list[dict[str, float]]) -> str:
    """Return a line of the table: medians, with the least and the most."""
    cells = []
    for key, scale, digits in (("rate", 1, 0), ("first", 1, 2), ("wait", 1e3, 1)):
        values = [one[key] * scale for one in found]
        low, middle, high = min(values), statistics.median(values), max(values)
        cells.append(f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})")
    longest = max(one["longest"] for one in found) * 1e3
    return f"| {name} | {' | '.join(cells)} | {longest:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 50, 200], help="ms")
    parser.add_argument("--shuffle", action="store_true", help="shuffle also by datasets")
    parser.add_argument("--quick", action="store_true", help="two files, one round, few steps")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.latency[0] / 1e3)
    if given.read:
        kind, where, disk, batches, steps = given.read
        try:
            read(kind, where, disk, int(batches), int(steps))
        except Exception:
            traceback.print_exc()
        # Do not wait for data workers.
        sys.stdout.flush()
        os._exit(1)

    files, rounds, steps = FILES, given.rounds, STEPS
    if given.quick:
        files, rounds, steps = 2, 1, 3
    readers = ("oneloop", "shuffled" if given.shuffle else "datasets")
    batches = files * GROUPS * ROWS // BATCH
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        size = write(folder, files)
        print(
            f"{date.today()}  python benchmarks/data_anywhere.py {' '.join(sys.argv[1:])}\n"
            f"Python {platform.python_version()}, torch {torch.__version__}, pyarrow "
            f"{pyarrow.__version__}, datasets {datasets.__version__}, {os.cpu_count()} cores, "
            f"{size / 1e6:,.0f} MB in {files + 1} files, {rounds} rounds\n",
            flush=True,
        )
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(rounds):
            for name in ("disk", "control"):
                one = measured("oneloop", str(folder), folder, batches, steps)
                print(number, name, one, file=sys.stderr, flush=True)
                found.setdefault(name, []).append(one)
            for latency in given.latency:
                # The first reader of a round is the second one of the next round.
                for kind in readers[:: 1 if number % 2 else -1]:
                    with server(folder, latency) as address:
                        one = measured(kind, f"{address}/list.txt", folder, batches, steps)
                    found.setdefault(f"{kind}, {latency:g} ms", []).append(one)
                    print(number, kind, latency, one, file=sys.stderr, flush=True)
        print(
            "| reader | samples/s of an epoch | s until the first batch | ms of waiting per step | "
            "longest wait, ms |\n|---|---|---|---|---|"
        )
        for name in sorted(found, key=lambda name: ("," in name, name)):
            print(line(name, found[name]))


if __name__ == "__main__":
    main()
