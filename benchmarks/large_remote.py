"""Train one epoch on 20 GB from a web server, and measure the disk and the memory that it takes.

The server has one Parquet file of 64 MB under 320 names. The run may use neither a download nor
much memory: the window of the row groups, and twice of it on the disk.

    python benchmarks/large_remote.py --names 320
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
from pyarrow import parquet

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))

from remote_data import Files  # noqa: E402

CHARACTERS = 64_000  # of a text
ROWS = 1000  # of a file
GROUP = 32
WINDOW = 64  # megabytes


def write(file: Path, rows: int) -> None:
    """Write texts that cannot be compressed."""
    draw = np.random.default_rng(rows)
    words = [f"{at % 7} " + draw.bytes(CHARACTERS // 2).hex() for at in range(rows)]
    table = pyarrow.table({"text": words, "label": ["ab"[at % 2] for at in range(rows)]})
    parquet.write_table(table, file, row_group_size=GROUP)


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, some of which may go meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def memory_of(process: psutil.Process) -> int:
    """Return the memory of a process and its children, without pages that they share."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().uss
        except psutil.Error:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=320)
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "files")
        folder.mkdir()
        write(folder / "one.parquet", ROWS)
        write(folder / "validation.parquet", 50)
        same = {f"train-{number:03}.parquet": folder / "one.parquet" for number in range(names)}
        with Files(folder, same=same) as server:
            listed = [*same, "validation.parquet"]
            (folder / "list.txt").write_text("\n".join(listed))
            total = names * (folder / "one.parquet").stat().st_size
            words = (
                f"snippets --task.data {server.address}/list.txt --task.layers 1 --task.width 8 "
                f"--task.heads 1 --task.length 16 --task.window {WINDOW} --duration 1ep "
                "--batch.size 256 --eval.every 0 --track none --machine.workers 1 --run.dir run"
            )
            cache = Path(scratch, "cache")
            began = time.monotonic()
            run = subprocess.Popen(
                [sys.executable, "-m", "oneloop.train", *words.split()],
                cwd=scratch,
                env={**os.environ, "ONELOOP_CACHE": str(cache)},
            )
            process = psutil.Process(run.pid)
            disk = memory = 0
            while run.poll() is None:
                disk = max(disk, size_of(cache))
                memory = max(memory, memory_of(process))
                time.sleep(0.5)
            seconds = time.monotonic() - began
            sent = sum(one.sent for one in server.seen)
            requests = len(server.seen)
    print(
        f"exit code {run.returncode}: {total / 1e9:.2f} GB in {names} names, {sent / 1e9:.2f} GB "
        f"were sent in {requests:,} requests in {seconds:.0f} s; at most {disk / 1e6:.0f} MB on "
        f"the disk, and {memory / 1e6:.0f} MB of memory of all processes"
    )


if __name__ == "__main__":
    main()
