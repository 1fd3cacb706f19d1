"""A started process of ``oneloop launch``: its preparation, signals and exit code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED
from oneloop.basics.launcher import CTRL_C, registered, report_exit_code
from oneloop.basics.system.processes import is_alive, is_stopped
from oneloop.basics.system.signals import AT_ONCE, on_stops
from oneloop.supervise.crash_report import say, stop_name, stopped_early

_INTERVAL = 0.2  # seconds between two checks
_EXIT = 10.0  # seconds after the end of the run in which its processes should exit


def end_early(number: int, frame: object) -> NoReturn:
    """Handle a stop signal before any process trains: report it, and exit."""
    report_exit_code(STOPPED)
    say(stopped_early(stop_name(number)))
    os._exit(STOPPED)


class Launched:
    """A process that this one starts, and the training processes, to which signals are forwarded.

    Args:
        command: of the process: a training process, or one that starts them.
        environment: of the process.
        folder: has the ids of the training processes, and receives their exit code.
        output: file descriptor to which the processes write; None: this process's streams.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        output: int | None = None,
    ) -> None:
        self._command = command
        self._folder = folder  # with the ids of the training processes
        self._signals: list[int] = []
        self._stopped_by = ""  # the first of them
        self._interrupted_at = float("inf")  # the first Ctrl-C, by time.monotonic
        self._forwarded: set[tuple[int, str]] = set()  # (index of the signal, process id)
        # The process ignores SIGINT, which a terminal also sends to the training processes: it
        # inherits that.
        on_stops(self._record)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        finally:
            signal.signal(signal.SIGINT, self._record)

    def _record(self, number: int, frame: object) -> None:
        """Record a signal."""
        self._stopped_by = self._stopped_by or stop_name(number)
        # The first Ctrl-C becomes SIGTERM: a terminal may send it to the training processes, too,
        # and a second one ends them.
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = min(self._interrupted_at, now)
            if now - self._interrupted_at < AT_ONCE:
                number = signal.SIGTERM
            with suppress(OSError):
                (self._folder / CTRL_C).touch()
        if number == signal.SIGINT or number not in self._signals:
            self._signals.append(number)

    def ended(self, until: float) -> int:
        """Wait for all processes; return oneloop's exit code.

        Raise TimeoutError at the time ``until`` (seconds, of ``time.monotonic``).
        """
        # If the launcher was killed, the training processes save and exit.
        code: int | None = None
        while code is None or self._alive():
            self._forward()
            self._continue_stopped()
            if time.monotonic() > until:
                self._process.kill()  # the others end with it
                raise TimeoutError
            if code is not None:
                time.sleep(_INTERVAL)
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_INTERVAL)

        # The file has the code that the training processes report: launchers turn each into 1. An
        # agent that was killed leaves the one of its last attempt.
        file = self._reported()
        if file is not None:
            return int(file.read_text())
        if self._signals and not registered(self._folder):
            trains = "oneloop.train" in " ".join(self._command)
            by = self._stopped_by
            say(stopped_early(by) if trains else f"stopped by {by}")
            return STOPPED
        if code in (0, BAD_INPUT):
            return code
        print("oneloop: error: a process of this run was killed from outside", file=sys.stderr)
        return ERROR

    def _forward(self) -> None:
        """Send each recorded signal once to each process, also to processes that start later.

        Until a training process has registered, the process that starts them gets it.
        """
        for index, number in enumerate(self._signals):
            for pid in self._alive() or [str(self._process.pid)]:
                if (index, pid) not in self._forwarded:
                    self._forwarded.add((index, pid))
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), number)

    def _reported(self) -> Path | None:
        """Return the file of the newest exit code."""
        files = self._folder.glob("exit_code*")
        return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)

    def _continue_stopped(self) -> None:
        """Continue processes that were stopped (SIGSTOP) before the run ended: they only exit."""
        # They have had some time to exit.
        file = self._reported()
        if file is None or time.time() - file.stat().st_mtime < _EXIT:
            return

        # Processes that are younger belong to another attempt.
        alive = self._alive()
        ended = file.stat().st_mtime_ns
        if any((self._folder / f"process-{pid}").stat().st_mtime_ns > ended for pid in alive):
            return
        for pid in {*alive, str(self._process.pid)}:
            if is_stopped(int(pid)):
                os.kill(int(pid), signal.SIGCONT)

    def _alive(self) -> list[str]:
        return [pid for pid in registered(self._folder) if is_alive(int(pid))]
