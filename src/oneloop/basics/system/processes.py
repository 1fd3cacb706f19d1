"""Processes: on which CPUs they run, what they do, and how they end with their parent."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_LINUX = sys.platform == "linux"


def usable_cores() -> int:
    """Return the number of CPUs on which this process may run."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the name of the CPU, or of its architecture if the system does not know it."""
    if _LINUX:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return _sysctl("machdep.cpu.brand_string") or platform.machine()


def boot_id() -> str:
    """Return what identifies the time since this machine was started; empty if unknown."""
    if _LINUX:
        with suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _sysctl("kern.bootsessionuuid")


def _sysctl(name: str) -> str:
    """Return a property of a system of the BSD family, such as macOS; empty if it has none."""
    with suppress(OSError):
        asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        return asked.stdout.strip()
    return ""


# variable that hands the parent's id and descriptors to a program that continues in a child
_HANDED_OVER = "ONELOOP_CONTINUES"


def continue_in_child(handles: Sequence[int]) -> int:
    """Continue this program in a child process, too; return the child's id, and 0 there.

    On Linux the child is a fork. Elsewhere it is the same command again, which finds its parent and
    the file descriptors by :func:`handed_over`.

    Args:
        handles: file descriptors that the child uses.
    """
    if _LINUX:
        return os.fork()
    for handle in handles:
        os.set_inheritable(handle, True)
    words = ",".join(map(str, [os.getpid(), *handles]))
    command = [sys.executable, *sys.orig_argv[1:]]
    return os.posix_spawn(sys.executable, command, {**os.environ, _HANDED_OVER: words})


def handed_over() -> list[int] | None:
    """Return the parent's id and the descriptors that :func:`continue_in_child` has handed over.

    None: this process is not such a child.
    """
    words = os.environ.pop(_HANDED_OVER, None)
    if words is None:
        return None
    parent, *handles = map(int, words.split(","))
    for handle in handles:
        os.set_inheritable(handle, False)
    return [parent, *handles]


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def die_with(parent: int) -> None:
    """Let this process be killed when its ``parent`` process ends. Call it on the main thread."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def is_alive(process: int) -> bool:
    """Return whether there is a running process with this id."""
    return bool(_asked(process, "status", or_else="zombie") != "zombie")


def is_stopped(process: int) -> bool:
    """Return whether SIGSTOP has stopped a process."""
    return bool(_asked(process, "status", or_else="") == "stopped")


def is_python(process: int) -> bool:
    """Return whether a process may run Python, by its command; True if that is not known."""
    return "python" in " ".join(_asked(process, "cmdline", or_else=["python"])).lower()


def children(process: int) -> list[int]:
    """Return the child processes of a process."""
    return [child.pid for child in _asked(process, "children", or_else=[])]


def bytes_moved() -> int:
    """Return how many bytes this process has read and written so far; 0 if that is unknown."""
    moved = _asked(os.getpid(), "io_counters", or_else=None)
    return 0 if moved is None else moved.read_chars + moved.write_chars + moved.read_bytes


def _asked(process: int, question: str, *, or_else: Any) -> Any:
    """Return the result of a method of psutil.Process.

    Args:
        process: its id.
        question: name of the method.
        or_else: result if the process does not exist, or cannot be examined.
    """
    import psutil  # 20 ms

    try:
        return getattr(psutil.Process(process), question)()
    except (psutil.Error, OSError, AttributeError):  # macOS has no io_counters
        return or_else
