"""Reports of a run that crashed or hung: the cause, and the files in the run folder."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oneloop.basics.exit_codes import ERROR
from oneloop.basics.files import dumps, replacing, vouched
from oneloop.basics.launcher import CTRL_C, exit_folder

STACKS = "stacks"  # folder of the stacks in the run folder
_SECONDS = 3.0  # time limit of writes to the run folder
_PAGE = 10.0  # time limit of the report page
_HINTS = {
    signal.SIGKILL: "the kernel does this if memory runs out, and so do schedulers",
    signal.SIGSEGV: "a fault in native code; its stack is above",
    signal.SIGBUS: "memory or storage that is no longer available; the stack is above",
    signal.SIGABRT: "native code aborted; the reason is above",
}
_EXITED = "some code called os._exit, or failed during exit"


@dataclass(frozen=True)
class Cause:
    """The cause of an error, as one rank reports it."""

    rank: int
    words: str  # the message
    text: str = ""  # the traceback
    follows: bool = False  # a consequence: the error only shows that another rank has ended


def say(words: str) -> None:
    """Print a message to the terminal, below the progress bars."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # show the cursor that a bar has hidden
    print(f"oneloop: {words}", file=sys.stderr, flush=True)


def describe_exit(rank: int, code: int, *, stopped_by: str = "") -> str:
    """Describe how a process ended that reported no error.

    Args:
        rank: of the process.
        code: its exit code; negative: the signal that killed it.
        stopped_by: the source of the stop request before it; empty: there was none.
    """
    before = f", after a stop request by {stopped_by}" if stopped_by else ""
    if code >= 0:
        return f"rank {rank} exited with code {code} and no error message{before}: {_EXITED}"
    try:
        by = signal.Signals(-code)
    except ValueError:
        return f"rank {rank} was killed by signal {-code}{before}"
    hint = f" ({_HINTS[by]})" if by in _HINTS else ""
    return f"rank {rank} was killed by {by.name}{before}{hint}"


def stop_name(number: int) -> str:
    """Return the name of a stop signal.

    That of SIGINT is Ctrl-C, also if ``oneloop launch`` forwards it as SIGTERM.
    """
    if number == signal.SIGINT or (exit_folder() / CTRL_C).exists():
        return "Ctrl-C"
    return signal.Signals(number).name


def stopped_early(by: str | None) -> str:
    """Return the message for a run that was stopped before it began; ``by`` requested the stop."""
    return f"stopped by {by} before the run started; nothing was written"


def write_summary(folder: Path, reason: str) -> None:
    """Write summary.json of a run whose processes have ended with an error."""

    def write() -> None:
        content = {"exit_reason": reason, "exit_code": ERROR}
        with replacing(folder / "summary.json") as draft:
            draft.write_text(dumps(vouched(content), indent=2) + "\n")
        (folder / "owner.json").unlink(missing_ok=True)

    _in_time(write)


def write_page(folder: Path) -> None:
    """Write the report page of such a run, unless that takes too long."""
    command = [sys.executable, "-m", "oneloop", "report", str(folder)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_PAGE, check=False)


def write_stacks(folder: Path, stacks: Mapping[int, str]) -> None:
    """Write the stacks of each rank to its own file."""

    def write() -> None:
        (folder / STACKS).mkdir(exist_ok=True)
        for rank, text in stacks.items():
            (folder / STACKS / f"rank-{rank:05d}.txt").write_text(text, encoding="utf-8")

    _in_time(write)


def _in_time(write: Callable[[], None]) -> None:
    """Write in a thread, since storage may hang; do not wait for it longer than _SECONDS."""

    def attempt() -> None:
        try:
            write()
        except OSError as error:
            print(f"oneloop: the run's folder cannot be written: {error}", file=sys.stderr)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_SECONDS)
