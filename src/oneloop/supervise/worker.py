"""The training process, from the supervisor's side."""

import ctypes
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from oneloop.supervise.hangs import RankStatus

_FIELDS = {field.name for field in fields(RankStatus)} - {
    "rank",
    "silent",
    "stopped",
    "stop_requested",
}

_WORK = 0.1  # seconds of CPU time that count as work


class Worker:
    """One training process.

    Args:
        pid: its process id.
        reports: file descriptor from which its reports (lines of JSON) are read.
        stacks: file descriptor from which its stacks are read, after SIGUSR2.
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
        self._cpu = 0.0  # CPU time in seconds when it last worked
        self._worked_at = float("-inf")
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

    def rank_status(self, *, stop_requested: bool) -> RankStatus | None:
        """Return the status of this rank; None before its first report."""
        if self._beat is None:
            return None
        status = RankStatus(self.rank)
        for name in _FIELDS & self._beat.keys():
            setattr(status, name, self._beat[name])

        # Add what the process cannot know.
        status.silent = time.monotonic() - self._last_report
        status.since += status.silent
        status.stop_requested = stop_requested
        if status.silent > 1.0:
            status.stopped, traced = self._stopped()
            status.held = status.held or traced
        return status

    def worked_at(self) -> float:
        """Return when the process or one of its data workers was last seen to use the CPU."""
        seconds = sum(map(_cpu_seconds, [self.pid, *_children(self.pid)]))
        if seconds - self._cpu > _WORK:
            self._cpu = seconds
            self._worked_at = time.monotonic()
        return self._worked_at

    def reset_timers(self) -> None:
        """Restart all timers: the whole machine was suspended."""
        self._last_report = time.monotonic()
        if self._beat is not None:
            self._beat["since"] = 0.0

    def _stopped(self) -> tuple[bool, bool]:
        """Return whether SIGSTOP stopped the process, and whether a debugger traces it."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return False, False
        about = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        stopped = about.get("State", "").startswith("T")
        return stopped, about.get("TracerPid", "0").strip() != "0"

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
        for pid in [self.pid, *_children(self.pid)] if self.alive() else []:
            if not _catches(pid, signal.SIGUSR2):
                continue
            # A stopped process would answer only later.
            if not wake and pid == self.pid and self._stopped()[0]:
                texts.append(f"process {pid} is stopped")
                continue
            with suppress(OSError):
                _to_main_thread(pid, signal.SIGUSR2)
                if wake:
                    os.kill(pid, signal.SIGCONT)
            text = self._read_stacks(seconds, freeze=pid if wake else None)
            role = "" if pid == self.pid else ", which loads data"
            texts.append(f"process {pid}{role}\n{text or '(no answer)'}\n")
        return "\n".join(texts)

    def _read_stacks(self, seconds: float, *, freeze: int | None) -> str:
        """Read the stacks of one process; stop the process ``freeze`` when they have arrived."""
        text = b""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                text += os.read(self._stacks, 1 << 16)
                until = min(until, time.monotonic() + 0.2)  # the rest follows at once
            except BlockingIOError:
                if text and freeze is not None:
                    os.kill(freeze, signal.SIGSTOP)
                    freeze = None
            time.sleep(0.02)
        return text.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process, and wait up to 2 s for its end."""
        self.signal(signal.SIGKILL)
        until = time.monotonic() + 2.0
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    try:
        lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(word) for text in lists for word in text.split()]


def _to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread.

    Otherwise another thread of a stopped process may get it, too late.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None:
        os.kill(pid, number)
    else:
        send(pid, pid, number)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would otherwise kill it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self").exists()
    for line in lines:
        if line.startswith("SigCgt"):
            mask = int(line.split()[1], 16)  # bit 0: signal 1
            return bool(mask >> (number - 1) & 1)
    return False
