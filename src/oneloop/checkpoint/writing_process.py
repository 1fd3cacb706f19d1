"""The writing process, seen from the training process."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneloop.checkpoint import writer

_PATIENCE = 15.0
"""seconds that it has for the save under way, when it is told to end"""


class WritingProcess:
    """A process that runs ``module``, and the memory it shares with this one: ``size`` bytes, pinned for a GPU."""

    def __init__(self, module: str, size: int, *, pin: bool) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            shared = os.memfd_create("oneloop-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                shared = os.dup(file.fileno())
        os.ftruncate(shared, max(1, size))
        self.buffer: Tensor = torch.frombuffer(mmap.mmap(shared, max(1, size)), dtype=torch.uint8)
        if pin and size:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)))
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(shared), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[shared],
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(shared)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""

    def tell(self, request: writer.SaveRequest) -> None:
        self._send(writer.as_line(request))

    def call_off(self) -> None:
        self._send(writer.as_line(None))

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it is gone, which answer() will say

    def answer(self, seconds: float | None) -> dict[str, Any] | None:
        """The answer to the last request, if it comes within these seconds (None: whenever); None: it has not."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._heard:
            try:
                more = os.read(handle, 1 << 16)
            except BlockingIOError:
                left = None if until is None else until - time.monotonic()
                if seconds == 0.0 or (left is not None and left <= 0):
                    return None
                select.select([handle], [], [], left)
                continue
            if not more:
                return {"error": f"the writing process ended with {self._process.wait()}"}
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # its storage hangs, or it waits for a rank that has gone
            self.kill()

    def kill(self) -> None:
        """Ends it at once; one that its storage holds may stay until that lets go."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
