"""The training process, from the supervisor's side."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from math import inf

from oneloop.basics.launcher import HOST
from oneloop.basics.system.processes import children, is_stopped
from oneloop.basics.system.signals import answers_with_stacks, ask_for_stacks
from oneloop.supervise.hangs import RankStatus
from oneloop.supervise.pipe import Connection

_ANSWER = 1.5  # seconds to wait for the stacks of a process
_SILENCE = 0.2  # seconds without output after which stacks count as complete


class Worker:
    """One training process.

    Args:
        pid: its process id.
        connection: for its reports, and for requests.
        stacks: file descriptor from which its stacks are read.
    """

    def __init__(self, pid: int, connection: Connection, stacks: int) -> None:
        self.pid = pid
        self.connection = connection
        self._stacks = stacks
        os.set_blocking(stacks, False)
        self.reported = RankStatus(connection.rank)  # with the last heartbeat
        self.status: int | None = None  # exit code, negative for a signal; None: it runs

    @property
    def patience(self) -> float:
        """Factor of all limits, as the process reported it; infinite if it has no limits."""
        return self.reported.patience or inf

    def rank_status(self) -> RankStatus:
        """Return the status of this rank: its last report, and what it cannot know."""
        silent = time.monotonic() - self.connection.heard
        stopped = silent > 1.0 and is_stopped(self.pid)
        node = os.environ.get(HOST, "")
        return replace(self.reported.later(silent), stopped=stopped, node=node)

    def reset_timers(self) -> None:
        """Restart all timers: the whole machine was suspended."""
        self.connection.heard = time.monotonic()
        self.reported.since = 0.0

    def alive(self) -> bool:
        """Return whether the process runs; if not, store its exit code."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.alive():
            os.kill(self.pid, number)

    def stacks(self, *, wake: bool) -> str:
        """Return the Python stacks of its threads and data workers; also ask for its collectives.

        Args:
            wake: continue a stopped process for this, and then stop it again, so that it does not
                train until it is killed.
        """
        texts = []
        self.connection.send(collectives=True)
        for pid in [self.pid, *children(self.pid)] if self.alive() else []:
            if not answers_with_stacks(pid, ours=pid == self.pid):
                continue
            # A stopped process would answer only later.
            if not wake and pid == self.pid and is_stopped(pid):
                texts.append(f"process {pid} is stopped")
                continue
            with suppress(OSError):
                ask_for_stacks(pid)
                if wake:
                    os.kill(pid, signal.SIGCONT)
            text = self._read_stacks()
            if wake and text:
                os.kill(pid, signal.SIGSTOP)
            role = "" if pid == self.pid else ", which loads data"
            texts.append(f"process {pid}{role}\n{text or '(no answer)'}\n")
        return "\n".join(texts)

    def _read_stacks(self) -> str:
        """Read the stacks of one process.

        The process writes them in many small parts, and on a busy machine with pauses: only
        silence after a whole line shows the end.
        """
        text = b""
        now = time.monotonic()
        until = now + _ANSWER
        silent_since = now
        while now < until:
            try:
                text += os.read(self._stacks, 1 << 16)
                silent_since = now
            except BlockingIOError:
                if text.endswith(b"\n") and now - silent_since > _SILENCE:
                    break
            time.sleep(0.02)
            now = time.monotonic()
        return text.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process, and wait up to 2 s for its end."""
        self.signal(signal.SIGKILL)
        until = time.monotonic() + 2.0
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
