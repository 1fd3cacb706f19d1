"""The training process, from the supervisor's side."""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

from oneloop.basics.system.processes import children, is_stopped
from oneloop.basics.system.signals import answers_with_stacks, ask_for_stacks
from oneloop.supervise.hangs import RankStatus

_FIELDS = {field.name for field in fields(RankStatus)} - {"rank", "silent", "stopped"}

_SILENCE = 0.2  # seconds without output after which stacks count as complete


class Worker:
    """One training process.

    Args:
        pid: its process id.
        reports: file descriptor from which its reports (lines of JSON) are read.
        stacks: file descriptor from which its stacks are read.
        requests: file descriptor; a byte to it asks for its collectives.
        rank: of the process.
    """

    def __init__(self, pid: int, reports: int, stacks: int, requests: int, rank: int) -> None:
        self.pid = pid
        self.reports = reports
        self._stacks = stacks
        self._requests = requests
        self.rank = rank
        for handle in (reports, stacks):
            os.set_blocking(handle, False)
        self._buffer = b""  # a part of the next message
        self._beat: dict[str, Any] | None = None  # the last heartbeat: fields of RankStatus
        self._last_report = time.monotonic()
        self.status: int | None = None  # exit code, negative for a signal; None: it runs

    @property
    def patience(self) -> float:
        """Factor of all limits, as the process reported it."""
        return float(self._beat["patience"]) if self._beat is not None else 1.0

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages since the last call; store heartbeats and leave them out."""
        with suppress(BlockingIOError):
            while more := os.read(self.reports, 1 << 16):
                self._buffer += more
        *lines, self._buffer = self._buffer.split(b"\n")
        received = []
        for line in lines:
            with suppress(ValueError):  # a message may be incomplete
                received.append(json.loads(line))
        for message in received:
            if "beat" in message:
                self._beat = message["beat"]
                self._last_report = time.monotonic()
        return [message for message in received if "beat" not in message]

    def rank_status(self) -> RankStatus | None:
        """Return the status of this rank; None before its first report."""
        if self._beat is None:
            return None
        status = RankStatus(self.rank)
        for name in _FIELDS & self._beat.keys():
            setattr(status, name, self._beat[name])

        # Add what the process cannot know.
        status.silent = time.monotonic() - self._last_report
        status.since += status.silent
        if status.silent > 1.0:
            status.stopped = is_stopped(self.pid)
        return status

    def reset_timers(self) -> None:
        """Restart all timers: the whole machine was suspended."""
        self._last_report = time.monotonic()
        if self._beat is not None:
            self._beat["since"] = 0.0

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

    def stacks(self, *, wake: bool = False, seconds: float = 1.5) -> str:
        """Return the Python stacks of its threads and data workers; also ask for its collectives.

        Args:
            wake: continue a stopped process for this, and then stop it again, so that it does not
                train until it is killed.
            seconds: how long to wait for each process.
        """
        texts = []
        with suppress(OSError):  # the process may have ended
            os.write(self._requests, b"c")
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
            text = self._read_stacks(seconds, freeze=pid if wake else None)
            role = "" if pid == self.pid else ", which loads data"
            texts.append(f"process {pid}{role}\n{text or '(no answer)'}\n")
        return "\n".join(texts)

    def _read_stacks(self, seconds: float, *, freeze: int | None) -> str:
        """Read the stacks of one process; stop the process ``freeze`` when they have arrived.

        The process writes them in many small parts, and on a busy machine with pauses: only
        silence after a whole line shows the end.
        """
        text = b""
        now = time.monotonic()
        until = now + seconds
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
        if text and freeze is not None:
            os.kill(freeze, signal.SIGSTOP)
        return text.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process, and wait up to 2 s for its end."""
        self.signal(signal.SIGKILL)
        until = time.monotonic() + 2.0
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
