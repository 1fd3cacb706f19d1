"""A process and its launcher: rank, world size, stop signals, and the exit code."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import ERROR, STOPPED


def ranks() -> int:
    """Return the number of processes (world size), from the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process; 0 if there is only one process."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0


_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop; SIGHUP is not one under nohup."""
    there = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [
        found
        for found in there
        if found.name != "SIGHUP" or signal.getsignal(found) is not signal.SIG_IGN
    ]


def on_stops(do: Callable[[int, Any], Any] | signal.Handlers) -> None:
    """Install a handler for all stop signals (``signal.SIG_IGN``: the parent handles them)."""
    for number in stop_signals():
        signal.signal(number, do)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Let this process be killed when its ``parent`` process ends. Call it on the main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def die_with_launcher() -> None:
    """End this process with torchrun or accelerate, if one of them started it.

    Call it before anything slow.
    """
    process = launcher()
    if process is not None:
        die_with(process)


def launcher() -> int | None:
    """Return the process id of the torchrun or accelerate that started this process, or None.

    If the launcher has already ended, init has adopted this process: then end this process.
    """
    variables = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if not variables:
        return None
    parent = os.getppid()
    if parent == 1 and not _is_python(1):
        print(
            "oneloop: the launcher of this process has exited; to run without one, unset "
            f"{', '.join(sorted(variables))}",
            file=sys.stderr,
        )
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ and not _is_python(parent):
        return None  # accelerate's variable was set in a shell
    return parent


def is_alive(process: int) -> bool:
    """Return whether this user has a running process with this id."""
    try:
        os.kill(process, 0)
        return _state(process) != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists()


def is_stopped(process: int) -> bool:
    """Return whether SIGSTOP has stopped a process; False where Linux's /proc is missing."""
    try:
        return _state(process) == "T"
    except OSError:
        return False


def _state(process: int) -> str:
    """Return the state of a process in one letter. Raise OSError."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _is_python(process: int) -> bool:
    """Return whether a process may be a launcher; in a container, a launcher can be process 1."""
    try:
        return b"python" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# variable with the path of the file in which ``oneloop launch`` expects the exit code
FILE = "ONELOOP_EXIT_FILE"
HOST = "ONELOOP_HOST"  # variable with the name of this node, if there are several
_LAUNCHER = "launcher"


def exit_file_variable(folder: Path) -> dict[str, str]:
    """Return the variable that lets launched processes report their exit code in this folder."""
    (folder / _LAUNCHER).write_text(str(os.getpid()))
    return {FILE: str(folder / "exit_code")}


def launcher_waits() -> bool:
    """Return whether ``oneloop launch`` is running, and waits for an exit code."""
    try:
        return is_alive(int((Path(os.environ[FILE]).parent / _LAUNCHER).read_text()))
    except (KeyError, OSError, ValueError):
        return False


def has_exit_file() -> bool:
    """Return whether this process should report its exit code by a file."""
    return FILE in os.environ and Path(os.environ[FILE]).parent.is_dir()


def register_process() -> None:
    """If ``oneloop launch`` waits for this process, ask it to forward its signals here."""
    file = os.environ.get(FILE)
    if file:
        with suppress(OSError):
            (Path(file).parent / f"process-{os.getpid()}").touch()


def report_exit_code(code: int) -> bool:
    """Report the exit code to ``oneloop launch``; return whether there is one.

    An error overrides other codes, a stop none.
    """
    file = os.environ.get(FILE)
    if not file:
        return False
    try:
        overrides = code == ERROR or not os.path.exists(file)
        if not overrides and code != STOPPED:
            overrides = Path(file).read_text() == str(STOPPED)
        if overrides:
            Path(file).write_text(str(code))
    except OSError:  # the launcher has ended
        return False
    return True
