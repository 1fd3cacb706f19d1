"""A writing process that is forked from its trainer: it starts in a tenth of the time.

It ends and answers as one that :func:`oneloop.checkpoint.writing_process.start` starts, but has the
command line of its trainer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from oneloop.checkpoint import writer, writing_process


class Forked:
    """A forked process, with the members of :class:`subprocess.Popen` that a trainer uses.

    Args:
        words: the module that it runs, and the arguments.
        shared: a descriptor that it inherits.
    """

    def __init__(self, words: Sequence[str], shared: int) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, requests, answers, shared)
        os.close(requests)
        os.close(answers)
        self.stdin = os.fdopen(self._requests, "wb")
        self.stdout = os.fdopen(self._answers, "rb")
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the writing process", timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


_start = writing_process.start


def start(words: Sequence[str], shared: int) -> Forked | subprocess.Popen[bytes]:
    """Start it, as :func:`oneloop.checkpoint.writing_process.start` does.

    A test's own writer starts in a new interpreter.
    """
    if words[0] != writer.__name__:
        return _start(words, shared)
    return Forked(words, shared)


def _become(words: Sequence[str], requests: int, answers: int, shared: int) -> NoReturn:
    """Run the module in this forked process, as in a new interpreter."""
    code = 1
    try:
        # Keep nothing of the trainer: its sockets would stay open when it is killed.
        os.setsid()
        os.dup2(requests, 0)
        os.dup2(answers, 1)
        os.closerange(3, shared)
        os.closerange(shared + 1, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

        # The streams of the trainer stay referenced, since their end would close 0 and 1.
        trainers = (sys.stdin, sys.stdout)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = [*words]
        writer.main()
        del trainers
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
