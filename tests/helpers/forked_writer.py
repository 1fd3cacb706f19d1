"""A writing process that is forked before its trainer has threads, and so starts in a tenth of the
time.

It ends and answers as one that :func:`oneloop.checkpoint.writing_process.start` starts, but has the
command line of its trainer. (A fork of a process with threads may wait forever for a lock that one
of them had.)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from oneloop.basics.system.processes import die_with
from oneloop.checkpoint import writer, writing_process

_LONGEST = 1 << 16  # bytes of the words of a writing process


class Forked:
    """A forked process that waits for its words, with the members of :class:`subprocess.Popen` that
    a trainer uses."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._code: int | None = None
        self.trainer = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _wait(self.trainer, theirs.detach())
        theirs.close()

    def begin(self, words: Sequence[str], shared: int) -> None:
        """Let it run a module.

        Args:
            words: the module, and the arguments.
            shared: a descriptor that it receives.
        """
        requests, mine = os.pipe()
        my_answers, answers = os.pipe()
        files = [requests, answers, shared]
        socket.send_fds(self._connection, [json.dumps([*words]).encode()], files)
        self._connection.close()
        os.close(requests)
        os.close(answers)
        self.stdin = os.fdopen(mine, "wb")
        self.stdout = os.fdopen(my_answers, "rb")

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
_waiting: list[Forked] = []


def prepare() -> None:
    """Fork the writing process of this trainer. Call it before this process has threads."""
    _waiting[:] = [Forked()]
    writing_process.start = start


def start(words: Sequence[str], shared: int) -> Forked | subprocess.Popen[bytes]:
    """Start it, as :func:`oneloop.checkpoint.writing_process.start` does.

    A test's own writer, a second writer, and that of a forked trainer start in a new interpreter.
    """
    if words[0] != writer.__name__ or not _waiting or _waiting[0].trainer != os.getpid():
        return _start(words, shared)
    forked = _waiting.pop()
    forked.begin(words, shared)
    return forked


def _wait(trainer: int, connection: int) -> NoReturn:
    """Run the module in this forked process, as in a new interpreter, when its words arrive."""
    code = 1
    try:
        # Keep nothing of the trainer: its files would stay open when it is killed.
        die_with(trainer)
        os.setsid()
        os.closerange(3, connection)
        os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

        # Wait for the words.
        with socket.socket(fileno=connection) as waiting:
            received, files, *_ = socket.recv_fds(waiting, _LONGEST, 3)
        if not received:  # the trainer has ended, or writes nothing
            os._exit(0)
        requests, answers, shared = files
        os.dup2(requests, 0)
        os.dup2(answers, 1)

        # The streams of the trainer stay referenced, since their end would close 0 and 1.
        trainers = (sys.stdin, sys.stdout)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        module, pid, _, *more = json.loads(received)
        sys.argv = [module, pid, str(shared), *more]
        writer.main()
        del trainers
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
