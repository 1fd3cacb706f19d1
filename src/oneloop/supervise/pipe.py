"""What a training process reports to its supervisor, as lines of JSON through a socket."""

import faulthandler
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from oneloop.basics.files import replacing
from oneloop.basics.heartbeats import BEATS, SET_UP
from oneloop.basics.launcher import rank
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


def _where(patience: float) -> dict[str, Any]:
    """Return the fields of RankStatus that the stack of the main thread shows.

    Call it from another thread.
    """
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [frame for frame, _ in traceback.walk_stack(main)]  # innermost first
    files = [frame.f_code.co_filename for frame in frames]
    shown: dict[str, Any] = {"waits": bool(files) and _waits(files[0])}

    # Name the innermost line of the user's code, else of any code.
    elsewhere = (_ROOT, *_LIBRARIES, "<")
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(elsewhere)]
    for inner in (own or frames)[:1]:
        code = inner.f_code
        shown["where"] = f"{code.co_filename}:{inner.f_lineno} in {code.co_name}"

    # A compiler takes long, and a debugger without end.
    if any(path in file for file in files for path in _COMPILERS):
        shown["limit"] = max(BEATS.limit(patience), patience * _COMPILING)
    if any(path in file for file in files for path in _DEBUGGERS):
        shown["held"] = True
    return shown


def _waits(file: str) -> bool:
    """Return whether the innermost code, which is in this file, waits for other processes."""
    if any(path in file for path in _WAITING):
        return True
    return file.startswith(_ROOT) and not file.removeprefix(_ROOT).lstrip("/").startswith(_WORKING)


TICK = 0.5  # seconds between two reports
_STACK_AFTER = 2.0  # seconds without a heartbeat before reports include the stack; x patience
_MANY = 1 << 18  # bytes between two reports that count as progress; reports are far smaller
_MOST_BYTES = 1 << 24  # of a message
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


class Connection:
    """Messages to and from a training process or another supervisor: lines of JSON.

    Args:
        link: the socket.
        rank: rank of the other side; -1: it is not known yet.
    """

    def __init__(self, link: socket.socket, rank: int = -1) -> None:
        self.link = link
        self.rank = rank
        self.heard = time.monotonic()  # when the last message arrived
        self._buffer = b""  # a part of the next message

    def received(self) -> list[dict[str, Any]] | None:
        """Return the messages since the last call.

        None if the connection is closed, or if a message is too long.
        """
        # Read all that has arrived.
        closed = True
        try:
            self.link.setblocking(False)
            while more := self.link.recv(1 << 16):
                self._buffer += more
                self.heard = time.monotonic()
                if len(self._buffer) > _MOST_BYTES:
                    return None
        except BlockingIOError:
            closed = False
        except OSError:
            pass

        # Divide it into messages, of which one may be incomplete: it took too long to send it.
        *lines, self._buffer = self._buffer.split(b"\n")
        if closed and not lines:
            return None
        messages = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                messages.append(json.loads(line))
        return messages

    def send(self, **message: Any) -> None:
        """Send one message; drop it after a second, or if the connection is closed."""
        with suppress(OSError):
            self.link.settimeout(1.0)
            self.link.sendall(json.dumps(message).encode() + b"\n")


class Channel:
    """The connection to the supervisor; without a supervisor, the methods do nothing."""

    def __init__(self) -> None:
        self._link: Connection
        self._owner = 0  # process that opened it; a fork must not write to it
        self._lock = threading.RLock()  # several threads send
        self.folder: Path | None = None  # the run folder, once the run writes to it

    @property
    def watched(self) -> bool:
        """Whether this process has a supervisor."""
        return os.getpid() == self._owner

    def open(self, handle: int, stacks: int) -> None:
        """Open the connection.

        Args:
            handle: file descriptor of the socket. On a message from it, the collectives are written
                to the run folder.
            stacks: file descriptor for the stacks of all threads, written when the supervisor asks.
        """
        self._link = Connection(socket.socket(fileno=handle))
        self._owner = os.getpid()
        BEATS.enter(SET_UP)  # the parent may have imported it long before the fork
        os.set_blocking(stacks, False)
        sys.excepthook = self._uncaught
        faulthandler.enable()  # print the stack if native code crashes
        write_stacks_to(stacks)

    def send(self, **message: Any) -> None:
        """Send one message; drop it if the supervisor does not read in time."""
        if self.watched:
            with self._lock:
                self._link.send(**message)

    def report(self, patience: float) -> None:
        """Report heartbeats from a thread, twice a second and at each new phase.

        ``patience`` is the factor of all limits.
        """
        if self.watched:
            BEATS.changed = lambda: self.send(beat=_beat(patience))
            threading.Thread(target=self._report, args=[patience], daemon=True).start()

    def _report(self, patience: float) -> None:
        """Send heartbeats, and answer the supervisor's requests. Runs in a thread."""
        moved = bytes_moved()
        while True:
            before = moved
            moved = bytes_moved()
            if moved - before > _MANY:
                BEATS.moved()
            self.send(beat=_beat(patience))
            # in a thread, as NCCL may not answer
            if wait([self._link.link], TICK) and self._link.received():
                threading.Thread(target=_write_collectives, args=[self.folder], daemon=True).start()

    def _uncaught(self, *uncaught: Any) -> None:
        """Report an uncaught exception, for example of an import."""
        kind, error, _ = uncaught
        sys.__excepthook__(*uncaught)
        words = f"rank {rank()}: {kind.__name__}: {error}"
        self.send(fault={"words": words})

    def fault(self, error: BaseException, words: str) -> None:
        """Report the error that ends this process."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.send(fault={"words": words, "text": text, "follows": _follows(error)})


def _beat(patience: float) -> dict[str, Any]:
    """Return the fields of RankStatus that this process knows."""
    # Read everything about the phase before the stack, which takes a while.
    usual = BEATS.usual()
    beat: dict[str, Any] = {
        "phase": BEATS.now_in,
        "count": BEATS.count,
        "since": time.monotonic() - BEATS.last,
        "limit": BEATS.limit(patience),
        "patience": patience,
        "median": usual[0] if usual else None,
        "held": patience <= 0,
        "unit": BEATS.unit,
        "reads": BEATS.reads(),
    }
    if beat["since"] > patience * _STACK_AFTER:
        beat |= _where(patience)
    return beat


def _write_collectives(folder: Path | None) -> None:
    """Write torch's flight recorder, if it records: the last collectives, and which have ended."""
    from torch._C import _distributed_c10d as recorders  # type: ignore[attr-defined]

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # of NCCL, and of gloo
        text = getattr(recorders, name, lambda: b"")()
        if folder is not None and b'"entries"' in text:
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


CHANNEL = Channel()  # of this process
