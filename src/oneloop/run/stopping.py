"""How a run is told to stop: by a signal, a time limit or a file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


class Stopping:
    """Whether this process was told to stop, and by what.

    Args:
        looks: whether it looks for the file; one process of a run does.
    """

    def __init__(self, *, looks: bool = True) -> None:
        self.by: str | None = None
        """a signal's name, ``stop.after`` or ``a STOP file``; None: not told"""
        self._looks, self._looked = looks, 0.0
        self._file: Path | None = None
        self._deadline = float("inf")
        self._interrupts = 0

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGUSR1 ask for a stop after the step; a second SIGINT ends at once."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def also(self, *, file: Path, after: float) -> None:
        """Also stop when ``file`` appears, and ``after`` seconds from now."""
        self._file, self._deadline = file, time.monotonic() + after

    def told(self) -> bool:
        """Whether to stop. Looks at the disk once a second at most."""
        now = time.monotonic()
        if self.by is None and now > self._deadline:
            self.by = "stop.after"
        if self._looks and self._file and now - self._looked > 1.0:
            self._looked = now
            if self._file.exists():
                self.by = "a STOP file"
        return self.by is not None

    def _on_signal(self, number: int, frame: Any) -> None:
        self.by = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                if os.isatty(1):
                    os.write(1, b"\x1b[?25h")  # a bar has hidden the cursor
                os._exit(128 + signal.SIGINT)
