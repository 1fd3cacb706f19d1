"""What is left in the folder of a run that was ended from outside; its storage may be what hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.basics.files import replacing
from oneloop.basics.plain_json import dumps, vouched

STACKS = "stacks"
"""the folder of them, in that of the run"""
_SECONDS = 3.0
"""that the storage has"""
_PAGE = 10.0
"""seconds that the page has"""


def leave_summary(folder: Path, content: Mapping[str, Any]) -> None:
    """summary.json of a run whose processes have gone."""

    def write() -> None:
        with replacing(folder / "summary.json") as draft:
            draft.write_text(dumps(vouched(content), indent=2) + "\n")
        (folder / "owner.json").unlink(missing_ok=True)

    _within(_SECONDS, write)


def leave_page(folder: Path) -> None:
    """The page of such a run, where it can be drawn in time."""
    command = [sys.executable, "-m", "oneloop.cli", "report", str(folder)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_PAGE, check=False)


def leave_stacks(folder: Path, stacks: Mapping[int, str]) -> None:
    """What each rank was doing, a file each."""

    def write() -> None:
        (folder / STACKS).mkdir(exist_ok=True)
        for rank, text in stacks.items():
            (folder / STACKS / f"rank-{rank:05d}.txt").write_text(text)

    _within(_SECONDS, write)


def _within(seconds: float, write: Callable[[], None]) -> bool:
    done = threading.Event()

    def tried() -> None:
        try:
            write()
            done.set()
        except OSError as error:
            print(f"oneloop: the run's folder cannot be written: {error}", file=sys.stderr)

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()
