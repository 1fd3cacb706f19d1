"""Whether the run's folder is the same one on all ranks: a save waits for every part of it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from oneloop.basics.errors import BadInput
from oneloop.run.agreement import Agreement

_SECONDS = 10.0
"""in which a shared storage shows a file that another machine has written"""


def refuse_other_folders(folder: Path, run: Agreement, *, main: bool, patience: float) -> None:
    """Every rank must get here, and rank 0 holds the folder.

    Raises:
        BadInput: on every rank: another process has another folder of that name.
    """
    if run.ranks == 1:
        return
    file = folder / "owner.json"
    word = run.from_main(_read(file) if main else None)
    until = time.monotonic() + _SECONDS * (patience or 1.0)
    while (found := _read(file)) != word and time.monotonic() < until:
        time.sleep(0.1)
    there = run.gathered((found == word, f"{folder.absolute()} on {socket.gethostname()}"))
    for rank, (same, place) in enumerate(there):
        if not same:
            raise BadInput(
                f"run.dir {folder} is another folder on rank {rank} ({place}) than on rank 0 ({there[0][1]}); it has to"
                " lie on storage that all processes share"
            )


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
