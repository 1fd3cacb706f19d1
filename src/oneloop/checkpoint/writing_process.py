"""The process that writes checkpoints, from the trainer's side."""

import json
import math
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.side_copies import SideCopy
from oneloop.basics.system.memory import nameless_file
from oneloop.checkpoint.pieces import Piece, stage
from oneloop.checkpoint.save_request import Answer

_PATIENCE = 15.0  # seconds for the save in progress when the writer must end
TORN = (
    "a parameter has changed between two updates, while it was copied to host memory; from now on, "
    "training waits for these copies"
)
"""error of a save that may have values of two steps"""


class _Mapping(mmap.mmap):
    """Memory that the writing process shares.

    CUDA knows pinned memory by its address, and rejects other memory at an address that is still
    registered. So pinned memory is registered until it is unmapped, however that happens. It is
    unmapped only after the last copy into it.
    """

    copied: torch.Event | None = None  # the end of the last copy
    _unregister: Callable[[], object] | None = None

    def pin(self, address: int, device: torch.device) -> str:
        """Pin the memory at its address; return CUDA's error, or an empty string."""
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(address, len(self), 0)
        if int(error) == 0:
            self._unregister = partial(cudart.cudaHostUnregister, address)
            return ""

        # The next kernel raises this error again, and so clears it: let a kernel do so here.
        with suppress(RuntimeError):
            torch.ones((), device=device)
        return str(cudart.cudaGetErrorString(error))

    def __del__(self) -> None:  # runs before mmap.mmap unmaps it; a weak reference would be late
        if self.copied is not None:
            with suppress(RuntimeError):  # after an error of CUDA, no copy runs
                self.copied.synchronize()
        if self._unregister is not None:
            self._unregister()


def start(words: Sequence[str], shared: int) -> "subprocess.Popen[bytes]":
    """Start a process that reads requests and writes answers.

    Args:
        words: its module, and the arguments.
        shared: descriptor of the memory.
    """
    # It must find this package also if the user runs it from a folder.
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[shared],
        start_new_session=True,  # Ctrl-C must not reach it while it starts
        env={**os.environ, "PYTHONPATH": path},
    )


class WritingProcess:
    """A process that writes checkpoints, and memory shared with it.

    Args:
        module: what it runs.
        device: of the trainer; if it is a GPU, the memory is pinned, for fast copies from there.
        uploads: arguments of Uploads, if there is a mirror.
        heard: receives the news of the uploads.
    """

    def __init__(
        self,
        module: str,
        *,
        device: torch.device,
        uploads: dict[str, Any] | None = None,
        heard: Callable[[Answer], None] = print,
    ) -> None:
        self._device = device
        self._heard = heard
        self.began = time.monotonic()
        self.wrote = self.began  # when it last reported that it had written something
        self.unpinned = ""  # CUDA's error, if the memory could not be pinned
        self._memory: _Mapping | None = None
        self._ahead: Thread | None = None  # makes the memory of saves
        # A request that the process does not know yet, and the copy that it waits for.
        self._request: Mapping[str, Any] | None = None
        self._copy: SideCopy | None = None
        self.dropped = ""  # why the last save was not sent to the process
        self._answer: Answer | None = None  # in place of one of the process

        # Create the shared memory.
        shared = nameless_file("oneloop-checkpoint")
        self._shared = os.fdopen(shared, "r+b", buffering=0)

        words = [module, str(os.getpid()), str(shared), json.dumps(uploads)]
        self._process = start(words, shared)

    def grow(self, size: int) -> None:
        """Let the shared memory have at least ``size`` bytes; its content may be lost."""
        if self._ahead is not None:
            self._ahead.join()
        self._grow(size)

    def grow_ahead(self, size: int) -> None:
        """Do so in a thread. Call it once, while no save is in progress."""
        self._ahead = Thread(target=self._grow, args=[size], name="save")
        self._ahead.start()

    def _grow(self, size: int) -> None:
        if self._memory is not None and size <= len(self._memory):
            return
        self._memory = None  # CUDA releases the old memory before it pins the new one
        self._shared.truncate(size)
        memory = _Mapping(self._shared.fileno(), size)
        if self._device.type == "cuda":
            if self._device.index:  # a new thread would use the first GPU
                torch.cuda.set_device(self._device)
            # Touch each page first, with all of torch's threads: to pin, CUDA uses only one.
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            buffer[:: mmap.PAGESIZE].zero_()
            self.unpinned = memory.pin(buffer.data_ptr(), self._device)
        self._memory = memory

    def write(
        self,
        request: Mapping[str, Any],
        mine: list[Piece],
        device: torch.device | None,
        watched: Sequence[Tensor],
    ) -> None:
        """Copy the pieces into the shared memory, and let the process write them.

        Args:
            request: is sent once the copy is complete.
            mine: the pieces.
            device: see :func:`stage`.
            watched: see there.
        """
        assert self._memory is not None
        copy = stage(mine, torch.frombuffer(self._memory, dtype=torch.uint8), device, watched)
        if copy is not None:
            self._memory.copied = copy.copied
        self._request = request
        self._copy = copy
        self.hand_over(wait=False)

    def hand_over(self, *, wait: bool) -> bool:
        """Send the request of :meth:`write` if its copy is complete; return whether it was now.

        Args:
            wait: for the copy (host sync).
        """
        if self._request is None:
            return False
        self.dropped = ""
        if self._copy is not None:
            if not wait and not self._copy.copied.query():
                return False
            self._copy.copied.synchronize()
            if self._copy.is_torn():
                self.dropped = TORN
        if self.dropped:
            self._answer = Answer(self._request["step"], error=TORN)
        else:
            self.send(self._request)
        self._request = None
        self._copy = None
        return True

    def send(self, request: Mapping[str, Any] | None) -> None:
        """Send a request; None cancels the save in progress."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the process has exited, which answer() reports

    def answer(self, seconds: float | None) -> Answer | None:
        """Return the answer to the last request; handle the other messages before it.

        Args:
            seconds: how long to wait for it; None: no limit.

        Returns:
            None after these seconds. If the process has exited, an answer with an error.
        """
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return answer
        received: Any = self._process.stdout
        until = math.inf if seconds is None else time.monotonic() + seconds
        left = seconds
        while wait([received], left):
            line = received.raw.readline()  # no further line waits in a buffer
            if not line.endswith(b"\n"):
                return Answer(error=f"the writing process ended with {self._process.wait()}")
            message = json.loads(line)
            if "wrote" in message:
                self.wrote = time.monotonic()
            elif message["is_news"]:
                self._heard(Answer(**message))
            else:
                return Answer(**message)
            left = None if seconds is None else max(0.0, until - time.monotonic())
        return None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let the process end after the save in progress; kill it if that takes too long."""
        assert self._process.stdin is not None
        try:
            self.hand_over(wait=True)
        except RuntimeError as error:  # of CUDA, which ends the run: the copy may be incomplete
            self.dropped = f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError):  # it had exited before a request
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()  # its storage hangs, or it waits for a rank that has exited
        self._memory = None  # unmaps it; a thread that makes some drops it at its end

    def kill(self) -> None:
        """Kill the process; if it is blocked in storage I/O, it ends when that returns."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._memory = None
