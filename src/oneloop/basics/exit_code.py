"""A run's exit code, past the launcher: torchrun makes every code 1, and accelerate a traceback of every code but 0."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from oneloop.basics.errors import ERROR, STOPPED
from oneloop.basics.orphans import is_alive

FILE = "ONELOOP_EXIT_FILE"
"""the variable by which ``oneloop launch`` says where it wants the exit code"""
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
