"""A store of objects on this machine, a small task, and hosts that share no disk."""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from worlds import free_port, here, run

# Threads of servers draw from this generator, never from the global one: a test that runs
# meanwhile in the main thread may compare the states of global generators.
_RANDOM = random.Random()
_PIECE = 1 << 16  # bytes that a download with a limited rate sends at once

TASK = """
import os
import time
import torch
from torch import nn

class Small:
    def __init__(self, frozen: bool = False) -> None:
        self.seconds, self.frozen = float(os.environ.get("SLOW", 0)), frozen
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(256, 8, generator=generator)
        self.y = self.x.sin().sum(1, keepdim=True)

    def model(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        if self.frozen:
            model[0].requires_grad_(False)
        return model

    def train_set(self):
        return list(zip(self.x[:192], self.y[:192]))

    def eval_sets(self):
        return {"validation": list(zip(self.x[192:], self.y[192:]))}

    def collate(self, samples):
        time.sleep(self.seconds)
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(), {}
"""  # noqa: E501
NESTED = """
    def save(self, model, folder):
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling/config.json").write_text("{}")
"""
WORDS = (
    "small.py:Small --batch.size 32 --duration 60 --save.every 5 --eval.every 20 --log.every 5 "
    "--track none"
)
WORDS += " --optimizer.name adamw --optimizer.lr 0.01 --ema.half_life 256 --watch.output quiet"
KEYS = {
    "AWS_ACCESS_KEY_ID": "not-a-secret-id",
    "AWS_SECRET_ACCESS_KEY": "SeCrEt-KeY",
    "AWS_DEFAULT_REGION": "us-east-1",
}
LEASE = {"ONELOOP_LEASE": "2"}  # seconds


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start moto's server; yield the variables with which it is reached."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        until = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until, (
                "moto's server did not start"
            )
            time.sleep(0.1)
        yield KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait()


def lay(folder: Path) -> Path:
    """Write the task into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.py").write_text(TASK)
    return folder


def on_hosts(words: Sequence[str], kill: float = 0.0, writers: float = 0.0) -> None:
    """Train this rank on a host that shares no disk with the others. After ``kill`` seconds the
    host is gone; every ``writers`` seconds (at random) its writing process is killed."""
    rank = os.environ.get("RANK", "0")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if "RANK" in os.environ else {}
    os.chdir(lay(Path(f"host-{rank}")))
    if rank == os.environ.get("CHANGED_ON"):  # the loss of this host is another one
        Path("small.py").write_text(TASK.replace("** 2", "** 4"))
    threading.Thread(target=_killer, args=[kill, writers], daemon=True).start()
    here([*words])


def _killer(kill: float, writers: float) -> None:
    if kill:
        time.sleep(kill)
        os.kill(os.getpid(), signal.SIGKILL)
    while writers:
        time.sleep(_RANDOM.uniform(0.1, 2 * writers))
        for pid in writers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
            print("writer killed", flush=True)


def writers_of(pid: int) -> list[int]:
    """Return the writing processes of a trainer."""
    children = [
        child
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return [
        int(child)
        for child in children
        if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def trained(
    folder: Path,
    *more: str,
    ranks: int = 1,
    config: str = "",
    variables=None,
    hosts: bool = False,
    **faults,
):
    """Run the small task in a folder; ``hosts``: each rank on its own host."""
    if not (folder / "small.py").exists():
        lay(folder)
    words = [*WORDS.split(), *more]
    how = {
        "ranks": ranks,
        "config": config or ("single" if ranks == 1 else "ddp"),
        "folder": folder,
    }
    how["variables"] = LEASE | (variables or {})
    if hosts:
        return run(on_hosts, words, faults.get("kill", 0.0), faults.get("writers", 0.0), **how)
    return run(here, words, **how)


@dataclass(frozen=True)
class Request:
    """A request that a proxy has answered."""

    method: str
    path: str  # without the query, unquoted
    start: int  # first byte of the range, if the status is 206
    end: int  # byte after the last one
    status: int
    sent: int  # bytes of the body

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a server, counts them, and fails or delays some of them.

    Attributes:
        fail: share of requests that get the status 503.
        down: all connections are closed without an answer.
        broken: requests for paths with this text get the status 503.
        denied: code of an S3 error that every request gets, such as ``AccessDenied`` or
            ``ExpiredToken``.
        hangs: requests for paths with this text wait for as long as the text is set.
        reset: share of downloads that are reset after half of their bytes.
        latency: seconds before each answer.
        rate: bytes per second of all uploads; 0: no limit.
        download_rate: bytes per second of all downloads; 0: no limit.
        seen: the answered requests (see :meth:`ranges` and :meth:`sent`).
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.host = address.partition("://")[2]
        self.fail = 0.0
        self.down = False
        self.broken = ""
        self.denied = ""
        self.hangs = ""
        self.reset = 0.0
        self.latency = 0.0
        self.rate = 0.0
        self.download_rate = 0.0

        self.requests = 0
        self.seen = list[Request]()
        self.written = list[str]()
        self.lock = threading.Lock()
        self.free_at = 0.0  # when the last upload and download of the line end
        self.download_free_at = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, name: str = "") -> list[Request]:
        """Return the successful reads of objects whose path contains a text."""
        return [
            one
            for one in list(self.seen)
            if one.method == "GET" and one.status == 206 and name in one.path
        ]

    def sent(self, name: str = "") -> int:
        """Return the bytes of these reads."""
        return sum(one.sent for one in self.ranges(name))

    def handle_error(self, request, client_address) -> None:
        """Print nothing."""


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy
    # An answer of two packets would wait for an acknowledgement of the first (Nagle).
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.requests += 1
            if server.rate:
                server.free_at = max(server.free_at, time.monotonic()) + len(body) / server.rate
        time.sleep(max(0.0, server.free_at - time.monotonic()) + server.latency)
        while server.hangs and server.hangs in self.path:
            time.sleep(0.02)
        if server.down:
            self.close_connection = True
            return None
        if _RANDOM.random() < server.fail or (server.broken and server.broken in self.path):
            return self._answer(503, [], b"")
        if server.denied:
            return self._answer(*_error(server.denied))
        connection = http.client.HTTPConnection(server.host)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if self.command == "PUT" and answer.status == 200:
            server.written.append(self.path)
        headers = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "server", "date")
        ]
        self._answer(answer.status, headers, content)
        return None

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        """Send an answer at the rate of downloads, and record it."""
        server = self.server
        path = unquote(self.path.partition("?")[0])
        sent = {name.lower(): value for name, value in headers}
        found = re.match(r"bytes (\d+)-(\d+)/", sent.get("content-range", ""))
        start, end = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
        server.seen.append(Request(self.command, path, start, end, status, len(content)))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in sent:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET" and status == 206 and _RANDOM.random() < server.reset:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            # Closing without lingering sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if not server.download_rate:
            self.wfile.write(content)
            return
        for begin in range(0, len(content), _PIECE):
            piece = content[begin : begin + _PIECE]
            # All downloads share one line.
            with server.lock:
                now = max(server.download_free_at, time.monotonic())
                server.download_free_at = now + len(piece) / server.download_rate
            time.sleep(max(0.0, server.download_free_at - time.monotonic()))
            self.wfile.write(piece)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

    def log_message(self, *words) -> None:
        """Print nothing."""


def _error(code: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return the status, the headers and the body of an error of S3."""
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code>"
    text += f"<Message>the test denies this request: {code}</Message></Error>"
    status = 400 if code == "ExpiredToken" else 403
    return status, [("Content-Type", "application/xml")], text.encode()
