"""Why a run ended that did not end by itself."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from oneloop.basics.errors import ERROR

_HINTS = {
    signal.SIGKILL: "the kernel does so where memory runs out, and so do schedulers",
    signal.SIGSEGV: "a fault in native code; its stack is above",
    signal.SIGBUS: "memory or storage that is not there any more; the stack is above",
    signal.SIGABRT: "native code gave up; it says why above",
}
_EXITED = "some code called os._exit, or failed as it left"


@dataclass(frozen=True)
class Cause:
    """What one rank tells."""

    rank: int
    words: str
    text: str = ""
    """its traceback"""
    follows: bool = False
    """it only says that another rank has gone"""
    stands: bool = False
    """a rank stands still"""

    @property
    def summary(self) -> dict[str, Any]:
        """Of the run."""
        return {"exit_reason": f"error: {self.words}", "exit_code": ERROR}


def of_a_death(rank: int, code: int, *, told: str | None) -> str:
    """Describe the end of a process without an error message: its exit code (negative: a signal), and the signal
    ``told`` before."""
    before = f", after it was told to stop by {told}" if told else ""
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and without a word{before}: {_EXITED}"
    try:
        by = signal.Signals(-code)
    except ValueError:
        return f"rank {rank} was killed by signal {-code}{before}"
    hint = _HINTS.get(by)
    return f"rank {rank} was killed by {by.name}{before}" + (f" ({hint})" if hint else "")


def stopped_early(by: str | None) -> str:
    """What is said of a run that was told to stop before it had begun."""
    return f"stopped by {by} before the run had begun; nothing was written"
