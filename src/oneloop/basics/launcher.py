"""What a process knows of its launcher: rank and world size, stop signals, whether it is alive, the exit code."""

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
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one; 0 where there is but one."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0


_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


def stop_signals() -> list[signal.Signals]:
    """Those that this process is to hear: not SIGHUP under nohup."""
    there = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    return [one for one in there if one.name != "SIGHUP" or signal.getsignal(one) is not signal.SIG_IGN]


def on_stops(do: Callable[[int, Any], Any] | signal.Handlers) -> None:
    """What is done at each of them from now on; ``signal.SIG_IGN`` where the process that started this one decides."""
    for one in stop_signals():
        signal.signal(one, do)


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
        variables = sorted({"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys())
        print(
            f"oneloop: the launcher of this process has exited; to run without one, unset {', '.join(variables)}",
            file=sys.stderr,
        )
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


FILE = "ONELOOP_EXIT_FILE"  # the variable by which ``oneloop launch`` says where it wants the exit code
_LAUNCHER = "launcher"


def offered(folder: Path) -> dict[str, str]:
    """The variable with which what this process launches tells its exit code, through a file in this folder."""
    (folder / _LAUNCHER).write_text(str(os.getpid()))
    return {FILE: str(folder / "exit_code")}


def awaited() -> bool:
    """Whether ``oneloop launch`` is there, and waits."""
    try:
        return is_alive(int((Path(os.environ[FILE]).parent / _LAUNCHER).read_text()))
    except (KeyError, OSError, ValueError):
        return False


def taken() -> bool:
    """Whether a launcher takes it."""
    return FILE in os.environ and Path(os.environ[FILE]).parent.is_dir()


def registered() -> None:
    """Tells ``oneloop launch``, where it listens, that this process is to get the signals that it gets."""
    if file := os.environ.get(FILE):
        with suppress(OSError):
            (Path(file).parent / f"process-{os.getpid()}").touch()


def noted(code: int) -> bool:
    """Tells ``oneloop launch``, where it listens, the exit code. That of a stop replaces no other, an error any."""
    file = os.environ.get(FILE)
    if not file:
        return False
    try:
        if code == ERROR or not os.path.exists(file) or (code != STOPPED and Path(file).read_text() == str(STOPPED)):
            Path(file).write_text(str(code))
    except OSError:  # of a launcher that has gone
        return False
    return True
