"""No orphans: a process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on this process is killed when ``parent``, which started it, is gone. Call it on the main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def die_with_launcher() -> None:
    """Ends with torchrun or accelerate, where one of them started this process. Call it before anything slow."""
    if (process := launcher()) is not None:
        die_with(process)


def launcher() -> int | None:
    """The process of torchrun or accelerate that started this one; None: neither did.

    A launcher that was gone before even this line has left its child to init: then this process ends.
    """
    if not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        return None
    parent = os.getppid()
    if parent == 1 and not _is_python(1):
        told = sorted({"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys())
        print(f"oneloop: what launched this process has gone; without one, unset {', '.join(told)}", file=sys.stderr)
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ and not _is_python(parent):
        return None  # somebody has set accelerate's variable in a shell
    return parent


def is_alive(process: int) -> bool:
    """Whether there is such a process, of this user's, that has not ended."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists()


def _is_python(process: int) -> bool:
    """Whether it may be a launcher (in a container one can be process 1)."""
    try:
        return b"python" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
