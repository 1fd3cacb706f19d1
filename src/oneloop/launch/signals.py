"""How a run is asked to stop, and how its processes end: with oneloop's exit code, through any launcher."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import StoppedEarly
from oneloop.basics.launcher import has_exit_file, on_stops, ranks, report_exit_code, stop_signals
from oneloop.supervise.pipe import LINK


def leave_at_once(code: int) -> NoReturn:
    """Ends this process from any thread and rank, without the others."""
    report_exit_code(code)
    LINK.send(ended=code)
    os._exit(code)


def leave(code: int, *, main: bool) -> NoReturn:
    """Ends this process: nothing is left to destructors, which abort now and then under gloo.

    Under ``oneloop launch`` the code goes through a file, since torchrun makes every code 1.
    """
    several = ranks() > 1
    LINK.send(ended=code)
    if has_exit_file() and (code != exit_codes.ERROR or not several):
        if main:
            report_exit_code(code)
        code = 0
    elif code == exit_codes.STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        code = 0  # torchrun would start the run again
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # bad input is told before torch is imported
    if distributed is not None and distributed.is_initialized() and code != exit_codes.ERROR:
        distributed.destroy_process_group()  # after an error the other ranks may never come to that
    if several:
        if not main and code not in (0, exit_codes.ERROR):
            time.sleep(3)  # torchrun ends all ranks with the first that fails: let rank 0 say why first
        os._exit(code)
    if LINK.watched and code == exit_codes.ERROR:  # nothing waits for a process that loads data, which may block
        os._exit(code)
    raise SystemExit(code)


_AT_ONCE = 1.0  # seconds in which a second interrupt is the first one, which a launcher has passed on


class Stopping:
    """Whether this process was told to stop, and by what; one process of a run ``looks`` for the STOP file."""

    def __init__(self, *, looks: bool = True) -> None:
        self.by: str | None = None  # a signal's name, ``stop.after`` or ``a STOP file``; None: not told
        self._looks, self._looked = looks, 0.0
        self._file: Path | None = None
        self._deadline = float("inf")
        self._heard: list[signal.Signals] = []
        self._interrupted = 0.0
        self.early = False  # nothing has been written yet, so that there is nothing to be saved

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for a stop: of a run that has begun after the step, of
        another at once, by :class:`StoppedEarly`. A second SIGINT ends at once."""
        self.early = True
        on_stops(self._end_at_twice)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """:meth:`listen` in here alone: what was heard is passed on afterwards to who had the signal before. A second
        SIGINT is a KeyboardInterrupt at once. Only the main thread can listen; another one goes without."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._raise_at_twice) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            for number in dict.fromkeys(self._heard):
                signal.raise_signal(number)

    def also(self, *, file: Path, after: float) -> None:
        """Also stop when ``file`` appears, and ``after`` seconds from now."""
        self._file, self._deadline = file, time.monotonic() + after

    def requested(self) -> bool:
        """Whether to stop. Looks at the disk once a second at most."""
        now = time.monotonic()
        if self.by is None and now > self._deadline:
            self.by = "stop.after"
        if self._looks and self._file and now - self._looked > 1.0:
            self._looked = now
            if self._file.exists():
                self.by = "a STOP file"
        return self.by is not None

    def _note(self, number: int, *, apart: float = 0.0) -> bool:
        """Whether it is an interrupt that was heard before, as many seconds ago at least."""
        now = time.monotonic()
        again = number == signal.SIGINT and number in self._heard and now - self._interrupted >= apart
        self._interrupted = now if number == signal.SIGINT else self._interrupted
        self.by = self.by or signal.Signals(number).name
        self._heard.append(signal.Signals(number))
        return again

    def _end_at_twice(self, number: int, frame: Any) -> None:
        if self._note(number, apart=_AT_ONCE):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # a bar has hidden the cursor
            leave_at_once(128 + signal.SIGINT)
        if self.early:
            self.early = False
            raise StoppedEarly

    def _raise_at_twice(self, number: int, frame: Any) -> None:
        if self._note(number):
            raise KeyboardInterrupt
