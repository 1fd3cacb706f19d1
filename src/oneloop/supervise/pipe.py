"""What a training process reports to its supervisor, as lines of JSON through a pipe."""

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from oneloop.basics.files import replacing
from oneloop.basics.heartbeats import BEATS, SET_UP
from oneloop.basics.launcher import rank
from oneloop.basics.system.files import readable_within
from oneloop.basics.system.processes import bytes_moved
from oneloop.basics.system.signals import write_stacks_to
from oneloop.supervise.crash_report import STACKS

ADDRESS = "ONELOOP_WATCHED_AT"
"""variable that tells rank 0's training process where its supervisor listens: HOST PORT TOKEN"""
_ROOT = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/accelerate/")
"""paths of code that waits for other ranks, or for a device that waits for them"""
_WORKING = ("data", "checkpoint", "show", "tasks", "evaluation.py", "prediction.py")
"""packages of oneloop in which a process hangs by itself, not in a collective"""
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/ipdb/")


@dataclass(frozen=True)
class StackSnapshot:
    """State of the main thread at one moment."""

    where: str  # ``file:line in function``: the innermost line of the user's code, else of any code
    waits: bool  # whether it waits for other processes
    compiles: bool
    debugged: bool  # whether a debugger runs


def stack_snapshot() -> StackSnapshot:
    """Inspect the main thread of this process. Call it from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []  # innermost first
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [frame.f_code.co_filename for frame in frames]

    # Name the innermost line of the user's code, else of any code.
    where = ""
    elsewhere = (_ROOT, *_LIBRARIES, "<")
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(elsewhere)]
    if frames:
        inner = (own or frames)[0]
        where = f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}"
    return StackSnapshot(
        where=where,
        waits=bool(files) and _waits(files[0]),
        compiles=any(path in file for file in files for path in _COMPILERS),
        debugged=any(path in file for file in files for path in _DEBUGGERS),
    )


def _waits(file: str) -> bool:
    """Return whether the innermost code, which is in this file, waits for other processes."""
    if any(path in file for path in _WAITING):
        return True
    return file.startswith(_ROOT) and not file.removeprefix(_ROOT).lstrip("/").startswith(_WORKING)


TICK = 0.5  # seconds between two reports
_STACK_AFTER = 2.0  # seconds without a heartbeat before reports include the stack; x patience
_MANY = 1 << 18  # bytes between two reports that count as progress; reports are far smaller
_SEND_TIMEOUT = 2.0  # time limit in seconds of a send
_COMPILING = 1800.0  # hang limit in seconds while a compiler runs, in any phase
_CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError", "FailedElsewhere")
_CONNECTION_ERRORS = (
    "connection reset",
    "connection closed",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
)


class Channel:
    """The pipe to the supervisor; without a supervisor, the methods do nothing."""

    def __init__(self) -> None:
        self._handle: int | None = None  # file descriptor of messages
        self._requests = -1  # file descriptor of the supervisor's requests
        self._owner = 0  # process that opened it; a fork must not write to it
        self._lock = threading.RLock()  # several threads send
        self.folder: Path | None = None  # the run folder, once the run writes to it
        self.patience = 1.0  # factor of all limits

    @property
    def watched(self) -> bool:
        """Whether this process has a supervisor."""
        return self._handle is not None and os.getpid() == self._owner

    def open(self, handle: int, stacks: int, requests: int) -> None:
        """Open the pipe.

        Args:
            handle: file descriptor to which messages are sent.
            stacks: file descriptor for the stacks of all threads, written when the supervisor asks.
            requests: file descriptor; on a byte from it, the collectives are written to the run
                folder.
        """
        self._handle = handle
        self._owner = os.getpid()
        self._requests = requests
        BEATS.enter(SET_UP)  # the parent may have imported it long before the fork
        for written in (handle, stacks):
            os.set_blocking(written, False)
        sys.excepthook = self._uncaught
        faulthandler.enable()  # print the stack if native code crashes
        write_stacks_to(stacks)

    def send(self, **message: Any) -> None:
        """Send one message; drop it if the supervisor does not read in time."""
        if not self.watched or self._handle is None:
            return
        line = json.dumps(message).encode() + b"\n"
        until = time.monotonic() + _SEND_TIMEOUT
        with self._lock:
            while line and time.monotonic() < until:
                try:
                    line = line[os.write(self._handle, line) :]
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:
                    return

    def report(self, patience: float) -> None:
        """Report heartbeats from a thread, twice a second and at each new phase.

        ``patience`` is the factor of all limits.
        """
        self.patience = patience
        if self.watched:
            BEATS.changed = lambda: self.send(beat=_beat(patience))
            threading.Thread(target=self._report, name="oneloop-beats", daemon=True).start()

    def _report(self) -> None:
        """Send heartbeats, and answer the supervisor's requests. Runs in a thread."""
        moved = bytes_moved()
        while True:
            before = moved
            moved = bytes_moved()
            if moved - before > _MANY:
                BEATS.moved()
            self.send(beat=_beat(self.patience))
            if not readable_within(self._requests, TICK):
                continue
            # in a thread, as NCCL may not answer
            if os.read(self._requests, 1) and self.folder is not None:
                threading.Thread(target=_write_collectives, args=[self.folder], daemon=True).start()
            else:
                time.sleep(TICK)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an uncaught exception, for example of an import."""
        sys.__excepthook__(kind, error, trace)
        words = f"rank {rank()}: {kind.__name__}: {error}"
        self.send(fault={"words": words, "text": "", "follows": False})

    def fault(self, error: BaseException, words: str) -> None:
        """Report the error that ends this process."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.send(fault={"words": words, "text": text, "follows": _follows(error)})


def _beat(patience: float) -> dict[str, Any]:
    """Return the fields of RankStatus that this process knows."""
    # Read everything about the phase before the snapshot, which takes a while.
    phase = BEATS.now_in
    count = BEATS.count
    unit = BEATS.unit
    reads = BEATS.reads
    since = time.monotonic() - BEATS.last
    usual = BEATS.usual()
    limit = BEATS.limit(patience)
    seen = StackSnapshot(where="", waits=False, compiles=False, debugged=False)
    if since > patience * _STACK_AFTER:
        seen = stack_snapshot()
    if seen.compiles:
        limit = max(limit, patience * _COMPILING)
    return {
        "phase": phase,
        "count": count,
        "since": since,
        "limit": limit,
        "patience": patience,
        "median": usual[0] if usual else None,
        "waits": seen.waits,
        "where": seen.where,
        "held": patience <= 0 or seen.debugged,
        "unit": unit,
        "reads": "" if reads is None else reads(),
    }


def _write_collectives(folder: Path) -> None:
    """Write torch's flight recorder, if it records: the last collectives, and which have ended."""
    from torch._C import _distributed_c10d as recorders  # type: ignore[attr-defined]

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # of NCCL, and of gloo
        text = getattr(recorders, name, lambda: b"")()
        if b'"entries"' in text:
            with suppress(OSError):
                (folder / STACKS).mkdir(exist_ok=True)
                with replacing(folder / STACKS / f"rank-{rank():05d}-collectives.json") as draft:
                    draft.write_bytes(text)


def _follows(error: BaseException) -> bool:
    """Return whether the error only shows that another process has ended."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _CONSEQUENCES:
            return True
        if isinstance(seen, RuntimeError | OSError):
            message = str(seen).lower()
            if any(part in message for part in _CONNECTION_ERRORS):
                return True
        seen = seen.__cause__ or seen.__context__
    return False


CHANNEL = Channel()  # the pipe of this process
