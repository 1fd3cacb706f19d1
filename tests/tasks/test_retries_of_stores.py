"""Requests that fail at first change no random number, neither of samples nor of the process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from oneloop import Loader
from oneloop.tasks.rows.open_data import Source, whole
from remote_data import Files, range_of
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.remote.data_sets",
    "oneloop.tasks.rows.remote.fetch_ahead",
    "oneloop.tasks.rows.remote.buckets",
)


class Google(ThreadingHTTPServer):
    """A bucket of Google Cloud Storage with one file, whose first requests get the status 503.

    Args:
        file: its content.
        listings: requests for the list of files that fail.
        ranges: requests for bytes that fail: of the footer, and then of row groups.
    """

    daemon_threads = True

    def __init__(self, file: Path, listings: int, ranges: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.content = file.read_bytes()
        self.fails = {False: listings, True: ranges}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Google

    def do_GET(self) -> None:
        server = self.server
        wanted = range_of(self.headers.get("Range"), len(server.content))
        ranged = wanted is not None
        if server.fails[ranged]:
            server.fails[ranged] -= 1
            return self._send(503, b"")
        if wanted is not None:
            return self._send(206, server.content[slice(*wanted)])
        about = {"name": "data/rows.parquet", "bucket": "b", "generation": "1"}
        about["size"] = str(len(server.content))
        return self._send(200, json.dumps({"items": [about]}).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *of: object) -> None:
        """Print nothing."""


class Noisy:
    """Rows with random numbers from before and after they are read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[float]:
        before = random.random()
        return [self.rows[index]["n"], before, random.random()]


def numbers(address: str) -> tuple[list[Any], list[float]]:
    """Return samples, and random numbers of this process between the steps that load them."""
    random.seed(0)
    rows = whole(Source(address, {"number": "n"}), window=4).parts["all"]
    own = [random.random()]
    samples = []
    for group in Loader(Noisy(rows), 20, collate=list, workers=0):
        samples += [sample for batch in group for sample in batch]
        own.append(random.random())
        if len(own) == 6:
            return samples, own
    raise AssertionError("the loop ended")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "rows.parquet"
    path.parent.mkdir()
    parquet.write_table(pa.table({"n": [*range(100)]}), path, row_group_size=10)
    return path


def expected() -> list[float]:
    draw = random.Random(0)
    return [draw.random() for _ in range(6)]


def test_requests_that_are_tried_again_draw_nothing(file, tmp_path):
    """gcsfs draws its waits from Python's global generator, in a thread of the process."""
    found = []
    for number, fails in enumerate([(0, 0), (2, 2)]):
        server = Google(file, *fails)
        variables = {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}",
            "ONELOOP_CACHE": str(tmp_path / f"cache-{number}"),
            "NO_GCE_CHECK": "true",  # looks for no credentials on the network
        }
        found += run(numbers, "gs://b/data", variables=variables).ok()
        assert not any(server.fails.values())
        server.shutdown()
        server.server_close()
    assert found[0] == found[1] and found[0][1] == expected()


def test_a_program_that_ends_with_rows_prints_nothing(file, tmp_path):
    """It also leaves no row groups on the disk."""
    program = """
        from oneloop.tasks.rows.open_data import whole
        from oneloop.tasks.rows.open_data import Source
        rows = whole(Source({address!r}, {{"number": "n"}}), window=4).parts["all"]
        print(rows[17])
    """
    with Files(file.parent) as files:
        words = "\n".join(map(str.strip, program.splitlines()))
        ended = subprocess.run(
            [sys.executable, "-c", words.format(address=f"{files.address}/rows.parquet")],
            env={**os.environ, "ONELOOP_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
    assert (ended.stdout, ended.stderr) == ("{'n': 17}\n", "")
    kept = [path for path in (tmp_path / "cache" / "row_groups").iterdir() if path.is_dir()]
    assert not kept
