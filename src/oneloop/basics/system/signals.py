"""Signals: those that request a stop, and that which asks for stacks. Not every system has all."""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# seconds; a second SIGINT within them is the first one, sent by the terminal and by a launcher
AT_ONCE = 1.0


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop; SIGHUP is not one under nohup."""
    stops = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    return stops


def on_stops(do: Callable[[int, Any], Any] | signal.Handlers) -> None:
    """Install a handler for all stop signals (``signal.SIG_IGN``: the parent handles them)."""
    for number in stop_signals():
        signal.signal(number, do)


def write_stacks_to(handle: int) -> None:
    """Write the stacks of all threads to a file descriptor whenever :func:`ask_for_stacks` asks."""
    faulthandler.register(signal.SIGUSR2, file=handle, all_threads=True)


def ask_for_stacks(process: int) -> None:
    """Ask a process for its stacks, on its main thread. Raise OSError.

    Another thread of a stopped process might receive the signal too late.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None:
        os.kill(process, signal.SIGUSR2)
    else:
        send(process, process, signal.SIGUSR2)


def answers_with_stacks(process: int, *, ours: bool) -> bool:
    """Return whether a process has a handler for the request, which would otherwise kill it.

    Args:
        process: its id.
        ours: the answer if the system does not know it: only Linux does.
    """
    if sys.platform != "linux":
        return ours
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("SigCgt"):
            mask = int(line.split()[1], 16)  # bit 0: signal 1
            return bool(mask >> (signal.SIGUSR2 - 1) & 1)
    return False
