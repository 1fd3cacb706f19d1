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


class Worker:
    """One training process: its reports (lines of JSON) and its stacks (after SIGUSR2) arrive at
    these file descriptors. A byte to ``requests`` asks for its collectives."""

    def __init__(self, pid: int, reports: int, stacks: int, requests: int, rank: int) -> None:
        self.pid, self.reports, self._stacks, self._requests, self.rank = (
            pid,
            reports,
            stacks,
            requests,
            rank,
        )
        for handle in (reports, stacks):
            os.set_blocking(handle, False)
        self._buffer = b""
        self._beat: dict[str, Any] | None = None
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
                self._beat, self._last_report = message["beat"], time.monotonic()
        return [message for message in received if "beat" not in message]

    def rank_status(self, *, stop_requested: bool) -> RankStatus | None:
        """Return the status of this rank; None before its first report."""
        if self._beat is None:
            return None
        status = RankStatus(
            self.rank, **{name: value for name, value in self._beat.items() if name in _FIELDS}
        )
        status.silent = time.monotonic() - self._last_report
        status.since += status.silent
        status.stop_requested = stop_requested
        if status.silent > 1.0:
            status.stopped, traced = self._stopped()
            status.held = status.held or traced
        return status

    def reset_timers(self) -> None:
        """Restart all timers: the whole machine was suspended."""
        self._last_report = time.monotonic()
        if self._beat is not None:
            self._beat["since"] = 0.0

    def _stopped(self) -> tuple[bool, bool]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return False, False
        about = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return about.get("State", "").startswith("T"), about.get("TracerPid", "0").strip() != "0"

    def alive(self) -> bool:
        """Return whether the process runs; if not, store its exit code."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def stacks(self, *, wake: bool = False, seconds: float = 1.5) -> str:
        """Return the Python stacks of its threads and data workers. ``wake`` continues a stopped
        process for this and then stops it again, so that it does not train until it is killed."""
        texts = []
        with suppress(OSError):  # the process may have ended
            os.write(self._requests, b"c")
        for pid in [self.pid, *_children(self.pid)] if self.alive() else []:
            if not _catches(pid, signal.SIGUSR2):
                continue
            if not wake and pid == self.pid and self._stopped()[0]:
                texts.append(f"process {pid} is stopped")
                continue
            with suppress(OSError):
                _to_main_thread(pid, signal.SIGUSR2)
                if wake:
                    os.kill(pid, signal.SIGCONT)
            text = self._read_stacks(seconds, freeze=pid if wake else None)
            texts.append(
                "process "
                f"{pid}{'' if pid == self.pid else ', which loads data'}\n{text or '(no answer)'}\n"
            )
        return "\n".join(texts)

    def _read_stacks(self, seconds: float, *, freeze: int | None) -> str:
        text, until = b"", time.monotonic() + seconds
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


def _children(pid: int) -> list[int]:
    try:
        lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(word) for text in lists for word in text.split()]


def _to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread; otherwise another thread of a stopped process may get it,
    too late."""
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
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)
