"""What a training process reports to its supervisor, as lines of JSON through a pipe."""

import faulthandler
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from oneloop.basics.heartbeats import BEATS, SET_UP
from oneloop.basics.launcher import rank

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OF_OTHERS = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/accelerate/")
"""where a process waits for the others, or for a device that waits for them"""
_DOING = ("data", "checkpoint", "show", "tasks", "evaluate.py", "predict.py")
"""rooms of oneloop in which a process that hangs does so by itself"""
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/", "/ipdb/")


@dataclass(frozen=True)
class StackSnapshot:
    """One look at the main thread."""

    where: str  # ``file:line in function``: the innermost line of someone's own code, or of any
    waits: bool  # it waits for other processes
    compiles: bool
    debugged: bool  # a person is looking at it


def stack_snapshot() -> StackSnapshot:
    """Of this process, now; to be asked from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [frame.f_code.co_filename for frame in frames]
    own = [frame for frame, file in zip(frames, files, strict=True) if not file.startswith((_OURS, *_LIBRARIES, "<"))]
    inner = (own or frames)[0] if frames else None
    return StackSnapshot(
        where=f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}" if inner else "",
        waits=bool(files) and _waits(files[0]),
        compiles=any(part in file for file in files for part in _COMPILERS),
        debugged=any(part in file for file in files for part in _DEBUGGERS),
    )


def _waits(file: str) -> bool:
    if any(part in file for part in _OF_OTHERS):
        return True
    return file.startswith(_OURS) and not file.removeprefix(_OURS).lstrip("/").startswith(_DOING)


TICK = 0.5  # seconds from one report to the next
_QUIET = 2.0  # seconds without a sign of life, from which on the stack is looked at
_UNREAD = 2.0  # seconds that the other side has to read
_COMPILING = 1800.0  # seconds that a compiler may take, whatever the phase
_CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_OF_A_CONNECTION = ("connection reset", "connection closed", "connection refused", "broken pipe", "gloo", "nccl")


class Link:
    """The way to the watching process; without one, everything here does nothing."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._owner = 0
        self._lock = threading.RLock()
        self.patience = 1.0

    @property
    def watched(self) -> bool:
        return self._handle is not None and os.getpid() == self._owner

    def open(self, handle: int, stacks: int) -> None:
        """From now on it is told through ``handle``; on SIGUSR2 the stacks of all threads go to ``stacks``."""
        self._handle, self._owner = handle, os.getpid()
        BEATS.enter(SET_UP)  # it may have been imported long ago, in the process that this one was forked from
        for written in (handle, stacks):
            os.set_blocking(written, False)
        sys.excepthook = self._uncaught
        faulthandler.enable()  # a fault in native code tells its stack
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def send(self, **message: Any) -> None:
        """One message; dropped where the other side does not read."""
        if not self.watched or self._handle is None:
            return
        line = json.dumps(message).encode() + b"\n"
        until = time.monotonic() + _UNREAD
        with self._lock:
            while line and time.monotonic() < until:
                try:
                    line = line[os.write(self._handle, line) :]
                except BlockingIOError:
                    time.sleep(0.01)
                except OSError:
                    return

    def report(self, patience: float) -> None:
        """Tells twice a second, from a thread, and at every new phase, how this process gets on; ``patience`` is the
        factor of all limits."""
        self.patience = patience
        if self.watched:
            BEATS.changed = lambda: self.send(beat=_beat(patience))
            threading.Thread(target=self._report, name="oneloop-beats", daemon=True).start()

    def _report(self) -> None:
        while True:
            self.send(beat=_beat(self.patience))
            time.sleep(TICK)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What nothing has caught: of the imports, for example."""
        sys.__excepthook__(kind, error, trace)
        self.send(fault={"words": f"rank {rank()}: {kind.__name__}: {error}", "text": "", "follows": False})

    def fault(self, error: BaseException, words: str) -> None:
        """Tells what has ended this process."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.send(fault={"words": words, "text": text, "follows": _follows(error)})


def _beat(patience: float) -> dict[str, Any]:
    since = time.monotonic() - BEATS.last
    beat: dict[str, Any] = {"phase": BEATS.now_in, "count": BEATS.count, "since": since, "limit": BEATS.limit(patience)}
    usual = BEATS.usual()
    beat |= {
        "patience": patience,
        "median": usual[0] if usual else None,
        "waits": False,
        "where": "",
        "held": patience <= 0,
        "unit": BEATS.unit,
    }
    if since > _QUIET:
        seen = stack_snapshot()
        beat |= {"waits": seen.waits, "where": seen.where, "held": beat["held"] or seen.debugged}
        if seen.compiles:
            beat["limit"] = max(beat["limit"], patience * _COMPILING)
    return beat


def _follows(error: BaseException) -> bool:
    """Whether it only says that another process has gone."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _CONSEQUENCES:
            return True
        if isinstance(seen, RuntimeError | OSError) and any(part in str(seen).lower() for part in _OF_A_CONNECTION):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


LINK = Link()  # of this process
