"""The signals that ask a run for a stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


def stop_signals() -> list[signal.Signals]:
    """Those that this process is to hear: not SIGHUP under nohup."""
    there = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [one for one in there if one.name != "SIGHUP" or signal.getsignal(one) is not signal.SIG_IGN]


def on_stops(do: Callable[[int, Any], Any] | signal.Handlers) -> None:
    """What is done at each of them from now on; ``signal.SIG_IGN`` where the process that started this one decides."""
    for one in stop_signals():
        signal.signal(one, do)
