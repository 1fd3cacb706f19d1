"""Why a run ended, and what is written to its folder then."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import ERROR
from oneloop.basics.files import dumps, replacing, vouched

STACKS = "stacks"  # folder of the stacks, in the run folder
_SECONDS = 3.0  # for the storage
_PAGE = 10.0  # for the report page
_HINTS = {
    signal.SIGKILL: "the kernel does this if memory runs out, and so do schedulers",
    signal.SIGSEGV: "a fault in native code; its stack is above",
    signal.SIGBUS: "memory or storage that is no longer available; the stack is above",
    signal.SIGABRT: "native code aborted; the reason is above",
}
_EXITED = "some code called os._exit, or failed during exit"


@dataclass(frozen=True)
class Cause:
    """What one rank tells."""

    rank: int
    words: str
    text: str = ""  # its traceback
    follows: bool = False  # it only says that another rank has gone
    hung: bool = False  # a rank hangs

    @property
    def summary(self) -> dict[str, Any]:
        """Of the run."""
        return {"exit_reason": f"error: {self.words}", "exit_code": ERROR}


def describe_exit(rank: int, code: int, *, stopped_by: str | None) -> str:
    """Describe the end of a process without an error message: its exit code (negative: a signal), and the signal
    ``told`` before."""
    before = f", after a stop request by {stopped_by}" if stopped_by else ""
    if code >= 0:
        return f"rank {rank} exited with code {code} and no error message{before}: {_EXITED}"
    try:
        by = signal.Signals(-code)
    except ValueError:
        return f"rank {rank} was killed by signal {-code}{before}"
    hint = _HINTS.get(by)
    return f"rank {rank} was killed by {by.name}{before}" + (f" ({hint})" if hint else "")


def stopped_early(by: str | None) -> str:
    """What is said of a run that was told to stop before it had begun."""
    return f"stopped by {by} before the run started; nothing was written"


def write_summary(folder: Path, content: Mapping[str, Any]) -> None:
    """summary.json of a run whose processes have gone."""

    def write() -> None:
        with replacing(folder / "summary.json") as draft:
            draft.write_text(dumps(vouched(content), indent=2) + "\n")
        (folder / "owner.json").unlink(missing_ok=True)

    _within(_SECONDS, write)


def write_page(folder: Path) -> None:
    """The page of such a run, where it can be drawn in time."""
    command = [sys.executable, "-m", "oneloop.cli", "report", str(folder)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_PAGE, check=False)


def write_stacks(folder: Path, stacks: Mapping[int, str]) -> None:
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
