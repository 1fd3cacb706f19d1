"""Stop requests, and the end of a run's processes with oneloop's exit code under any launcher."""

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
from oneloop.basics.exit_codes import INTERRUPTED, StoppedEarly
from oneloop.basics.launcher import exit_folder, ranks, report_exit_code
from oneloop.basics.system.signals import on_stops, stop_signals
from oneloop.supervise.crash_report import stop_name
from oneloop.supervise.pipe import CHANNEL


def leave_at_once(code: int) -> NoReturn:
    """End this process at once, from any thread and rank, without waiting for other ranks."""
    report_exit_code(code)
    CHANNEL.send(ended=code)
    os._exit(code)


def leave(code: int, *, main: bool) -> NoReturn:
    """End this process, without destructors if there are several: under gloo these abort sometimes.

    Under ``oneloop launch`` a file passes the code on, since torchrun turns every code into 1.

    Args:
        code: oneloop's exit code.
        main: whether this is rank 0.
    """
    several = ranks() > 1
    CHANNEL.send(ended=code)

    # Choose the code for the launcher.
    if exit_folder().is_dir() and (code != exit_codes.ERROR or not several):
        reports = main or os.environ.get("LOCAL_RANK") == "0"  # the file is on this node
        if not reports or report_exit_code(code):
            code = 0
    elif code == exit_codes.STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        code = 0  # torchrun would start the run again

    # End the process group, if this cannot block.
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # not imported yet if the input is bad
    if distributed is not None and distributed.is_initialized() and code != exit_codes.ERROR:
        distributed.destroy_process_group()  # after an error, other ranks may never call it

    if several:
        if not main and code not in (0, exit_codes.ERROR):
            # torchrun kills all ranks after the first failure: let rank 0 print its error first
            time.sleep(3)
        os._exit(code)
    # do not wait for data workers, which may block
    if CHANNEL.watched and code == exit_codes.ERROR:
        os._exit(code)
    raise SystemExit(code)


class Stopping:
    """Stop requests for this process, by signals, time limit or STOP file."""

    def __init__(self) -> None:
        # source: a signal's name, ``Ctrl-C``, ``stop.after`` or ``a STOP file``; None: no request
        self.by: str | None = None
        # times are those of time.monotonic
        self._last_check = 0.0  # of the file
        self._file: Path | None = None
        self._deadline = float("inf")

        self._signals: list[signal.Signals] = []
        self._is_called = False  # whether a program of the user's calls oneloop
        # whether the run has not begun; None: StoppedEarly was raised
        self.early: bool | None = False

    def listen(self) -> None:
        """Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP from now on.

        They stop the run after the current step. Before the run has begun they raise
        :class:`StoppedEarly`. The supervisor ends all processes at a second SIGINT; without one,
        this process ends.
        """
        self.early = True
        on_stops(self._handle)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the same signals in this context.

        Afterwards raise them again for the previous handlers. A second SIGINT raises
        KeyboardInterrupt at once. Outside of the main thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_called = True
        before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            for number in dict.fromkeys(self._signals):
                signal.raise_signal(number)

    def also(self, *, file: Path | None, after: float) -> None:
        """Also stop when ``file`` appears (None: another rank looks), and ``after`` seconds."""
        self._file = file
        self._deadline = time.monotonic() + after

    def requested(self) -> bool:
        """Return whether a stop is requested; check the STOP file at most once a second."""
        now = time.monotonic()
        if self.by is None and now > self._deadline:
            self.by = "stop.after"
        if self._file and now - self._last_check > 1.0:
            self._last_check = now
            if self._file.exists():
                self.by = "a STOP file"
        return self.by is not None

    def _handle(self, number: int, frame: Any) -> None:
        again = number == signal.SIGINT and number in self._signals
        self.by = self.by or stop_name(number)
        self._signals.append(signal.Signals(number))
        if again and self._is_called:
            raise KeyboardInterrupt
        if again and not CHANNEL.watched:
            leave_at_once(INTERRUPTED)
        if self.early:
            self.early = None
            raise StoppedEarly
