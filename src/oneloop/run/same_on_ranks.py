"""Check that all ranks have the same folder. Otherwise the run would hang."""

import socket
import time
from pathlib import Path

from oneloop.basics.exit_codes import BadInput
from oneloop.launch.processes import Run

_SECONDS = 10.0  # until a file from another machine appears on shared storage


def in_one_folder(folder: Path, run: Run, patience: float, *, required: bool) -> bool:
    """Compare the run folders of all ranks. Collective: call on every rank.

    Args:
        folder: the run folder, which rank 0 has locked.
        run: this process.
        patience: factor of the time that a file may take to appear on another machine.
        required: whether it is an error if a rank sees another folder.

    Returns:
        Whether all ranks see the folder of rank 0.

    Raises:
        BadInput: a rank sees another folder, and it is ``required``.
    """
    # Wait until this rank sees the file that rank 0 wrote.
    file = folder / "owner.json"
    owner = run.from_main(_read(file) if run.main else None)
    until = time.monotonic() + _SECONDS * (patience or 1.0)
    while _read(file) != owner and time.monotonic() < until:
        time.sleep(0.1)

    there = run.gathered((_read(file) == owner, f"{folder.absolute()} on {socket.gethostname()}"))
    for rank, (same, path) in enumerate(there):
        if not same and required:
            raise BadInput(
                f"run.dir {folder} is another folder on rank {rank} ({path}) than on rank 0 "
                f"({there[0][1]}); put it on shared storage, or set save.mirror"
            )
    return all(same for same, _ in there)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
