"""The save in progress on one rank, and the process that writes it."""

import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oneloop.basics.heartbeats import BEATS, SAVING
from oneloop.basics.progress import Working
from oneloop.checkpoint import writer
from oneloop.checkpoint.state_dict import Piece, stage
from oneloop.checkpoint.store import Store

_PATIENCE = 15.0  # seconds for the save in progress when the writer must end


class WritingProcess:
    """A process that runs ``module``, and memory shared with it, pinned if ``pin``. ``uploads``:
    arguments of :class:`oneloop.checkpoint.uploads.Uploads`, if there is a mirror; ``heard``
    receives its news."""

    def __init__(
        self,
        module: str,
        *,
        pin: bool,
        uploads: dict[str, Any] | None = None,
        heard: Callable[..., None] = print,
    ) -> None:
        self._pin, self._heard = pin, heard
        if hasattr(os, "memfd_create"):
            shared = os.memfd_create("oneloop-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                shared = os.dup(file.fileno())
        self._shared = os.fdopen(shared, "r+b", buffering=0)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", module, str(os.getpid()), str(shared), json.dumps(uploads)]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "pass_fds": [shared],
        }
        self._process = subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": path})
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._received = b""

    def grow(self, size: int) -> None:
        """Let the shared memory have at least ``size`` bytes; its content may be lost."""
        if size > len(self.buffer):
            self._shared.truncate(size)
            self.buffer = torch.frombuffer(
                mmap.mmap(self._shared.fileno(), size), dtype=torch.uint8
            )
            if self._pin:
                torch.cuda.check_error(
                    int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0))
                )

    def send(self, request: Mapping[str, Any] | None) -> None:
        """Send a request; None cancels the save in progress."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the process has exited, which answer() reports

    def answer(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the answer to the last request, or None after ``seconds`` without one (None: no
        limit)."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            if b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                if "news" not in (answer := dict(json.loads(line))):
                    return answer
                self._heard(**answer["news"])
                continue
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
            self._received += more

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except (
            subprocess.TimeoutExpired
        ):  # its storage hangs, or it waits for a rank that has exited
            self.kill()

    def kill(self) -> None:
        """Kill the process; if it is blocked in storage I/O, it ends when that returns."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


WRITER = "oneloop.checkpoint.writer"  # module of the writing process
_MIN_LIMIT = 10.0  # seconds; minimum of the time limit of a save
# bytes per second; assumed minimum throughput of storage (a tenth of it for a bucket)
_MIN_THROUGHPUT = 10e6
_MIN_UPLOAD = 120.0  # seconds; minimum of the time limit of a save to a bucket
_STILL = "still"
_TAKEN = "Taken: "


class SaveInProgress:
    """The save in progress on one rank. ``agree`` gathers a value of all ranks (None: one process),
    ``max_failures`` bounds consecutive failures, and ``patience`` scales the time limit of a save
    (0: none)."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        agree: Callable[[Any], list[Any]] | None,
        pin: bool,
        max_failures: int,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._rank, self._agree, self._pin, self._say = store, rank, agree, pin, say
        self._process: WritingProcess | None = None
        self._error: str | None = None
        self._pending = False
        self._step, self._size, self._began = 0, 0, 0.0
        self._slowest = 0.0  # seconds of the slowest save so far
        self._patience = patience
        self._shown: Working | None = None
        self._failures, self._max_failures = 0, max_failures
        self.uploads: dict[str, Any] | None = None  # arguments of Uploads, if there is a mirror
        self._mirror_failed = False
        self.stuck = False  # whether the save exceeds the time limit on any rank

    def begin(self, request: writer.SaveRequest, pieces: list[Piece]) -> None:
        """Copy to host memory and let the writing process write."""
        process = self.start()
        process.grow(max(1, request.size))
        stage(pieces, process.buffer)
        process.send(asdict(request))
        self._pending, self._began = True, time.monotonic()
        self._step, self._size = request.step, request.size
        self._shown = Working(f"saving step {request.step}")

    def start(self) -> WritingProcess:
        """Return the writing process; start it if it does not run."""
        if self._process is not None and not self._process.alive():
            self._process.close()
            self._process = None
        if self._process is None:
            self._process = WritingProcess(
                WRITER, pin=self._pin, uploads=self.uploads, heard=self._heard
            )
        return self._process

    def _heard(self, *, step: int = 0, error: str | None = None, taken: bool = False) -> None:
        """Receive news of uploads: the newest ``step`` in the mirror, or an error."""
        if taken:
            self._error = f"{_TAKEN}{error}"
        elif bool(error) != self._mirror_failed:
            failed = f"MIRROR FAILED; a later save tries again: {error} (the run folder is intact)"
            self._say(failed if error else f"the mirror works again, and holds step {step}")
        self._mirror_failed = bool(error)

    def end_uploads(self, *, final: bool) -> dict[str, Any]:
        """Return the result of ``Uploads.end``, after waiting for it; cancel a save that waits for
        other ranks."""
        process, answer = self.start(), None
        process.send({"end": {"final": final}})
        while answer is None or "step" in answer:  # of a save that was in progress
            answer = process.answer(1.0)
            BEATS.beat()
        return answer

    def write_here(self, request: writer.SaveRequest, pieces: list[Piece]) -> None:
        """Write in this process; rank 0 writes last, after all other ranks have finished or
        failed."""
        buffer = torch.empty(request.size, dtype=torch.uint8)
        stage(pieces, buffer)
        data = buffer.numpy().data
        if self._rank != 0:
            self._error = _attempt(lambda: writer.write(request, data))
        others = self._gather(self._error)
        if self._rank == 0 and not any(others):
            self._error = _attempt(lambda: writer.write(request, data))
        if self._agree is None and self._error is None:
            self._failures = 0

    def poll(self) -> str | None:
        """Return this rank's error if it is known by now. Does not block (about 1 us)."""
        process = self._process
        if process is not None and (self._pending or self.uploads is not None):
            answer = process.answer(0.0)
            if self._pending:
                self._record(answer)
        return self._error

    def finish(self, *, or_go_on: bool = False) -> str | None:
        """Wait for the save. Return the error, the same on all ranks; None if the checkpoint is
        complete or none was in progress. With ``or_go_on``, leave a slow save running and set
        ``stuck``. Collective. Raises OSError on all ranks after more than ``max_failures``
        failures, or if the save takes too long."""
        if not self._pending and self._error is None and self._agree is None:
            self.stuck = False
            return None
        with BEATS.phase(SAVING):
            errors = self._collect_errors()
        still = [rank for rank, problem in enumerate(errors) if problem == _STILL]
        self.stuck = bool(still)
        real = [problem for problem in errors if problem and problem != _STILL]
        if still and not real:
            taken = (
                f"the save of step {self._step} did not finish within "
                f"{time.monotonic() - self._began:.0f} s"
            )
            if or_go_on:
                if self._rank == 0:
                    self._say(
                        f"{taken}: its storage does not respond; continuing without a new "
                        "checkpoint"
                    )
                return None
            self._end_process()
            raise OSError(
                f"{taken} (rank {', '.join(map(str, still))}): its storage does not respond"
            )
        if self._pending:
            self._end_process()  # another rank failed, so this rank's shard is useless
        self._error, self._pending, self.stuck = None, False, False
        if not real:
            self._failures = 0
            return None
        return self._failed(
            next((first for first in real if not first.startswith("Gone")), real[0])
        )

    def _collect_errors(self) -> list[str | None]:
        """Return the error of every rank. Rank 0 waits last, because it completes the
        checkpoint."""
        if self._rank != 0:
            self._wait()
        others = self._gather(self._state())
        if self._rank == 0 and self._pending and self._process is not None:
            if any(problem not in (None, _STILL) for problem in others[1:]):
                self._process.send(None)
            if _STILL not in others[1:]:
                self._wait()
        if self._rank == 0 and (
            self._error or any(problem not in (None, _STILL) for problem in others)
        ):
            # no writer is active, and none starts before all ranks know the result
            self._store.sweep(".draft")
        return self._gather(self._state())

    def _state(self) -> str | None:
        return self._error or (_STILL if self._pending else None)

    def _failed(self, problem: str) -> str:
        self._failures += 1
        if problem.startswith(_TAKEN):
            raise OSError(problem.removeprefix(_TAKEN))
        if self._failures > self._max_failures:
            raise OSError(f"{self._failures} saves in a row have failed, the last one: {problem}")
        if self._rank == 0:
            self._say(
                f"SAVE FAILED; the next save tries again: {problem} (the previous checkpoint "
                "is intact)"
            )
        return problem

    def _wait(self) -> None:
        if self._pending and self._process is not None:
            least, rate = _MIN_LIMIT, _MIN_THROUGHPUT
            if self.uploads is not None and self.uploads["counts"]:
                least, rate = _MIN_UPLOAD, min(rate, self.uploads["limit"] or rate) / 10
            limit = self._patience * max(least, 3 * self._slowest, self._size / rate)
            self._record(
                self._process.answer(
                    max(0.0, self._began + limit - time.monotonic()) if limit else None
                )
            )

    def _record(self, answer: dict[str, Any] | None) -> None:
        if answer is not None:
            self._pending = False
            if self._shown is not None:
                self._shown.done()
            self._error = answer.get("error")
            self._slowest = max(self._slowest, time.monotonic() - self._began)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._agree is None else self._agree(value)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        """End the writing process."""
        if self._process is not None:
            self._process.close()
            self._process = None


def _attempt(act: Callable[[], None]) -> str | None:
    try:
        act()
    except (OSError, writer.Gone) as error:
        return f"{type(error).__name__}: {error}"
    return None
