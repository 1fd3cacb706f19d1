"""A run's exit code, past the launcher: torchrun makes every code 1, and accelerate a traceback of every code but 0."""

from __future__ import annotations

import os
from pathlib import Path

from oneloop.basics.errors import ERROR, STOPPED

FILE = "ONELOOP_EXIT_FILE"
"""the variable by which ``oneloop launch`` says where it wants the exit code"""


def registered() -> None:
    """Tells ``oneloop launch``, where it listens, that this process is to get the signals that it gets."""
    if file := os.environ.get(FILE):
        (Path(file).parent / f"process-{os.getpid()}").touch()


def noted(code: int) -> bool:
    """Tells ``oneloop launch``, where it listens, the exit code. That of a stop replaces no other, an error any."""
    file = os.environ.get(FILE)
    if not file:
        return False
    if code == ERROR or not os.path.exists(file) or (code != STOPPED and Path(file).read_text() == str(STOPPED)):
        Path(file).write_text(str(code))
    return True
