"""The start of a run, before the slow imports.

Start the supervisor, and report bad input at once.
"""

import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import printable
from oneloop.basics.launcher import launcher, rank, ranks
from oneloop.basics.streams import lossy
from oneloop.basics.system.processes import continue_in_child, die_with, handed_over
from oneloop.basics.system.signals import on_stops
from oneloop.launch.signals import leave
from oneloop.recipe.parse import read
from oneloop.supervise.pipe import CHANNEL, Connection


def begin() -> None:
    """Start the supervisor, then read the command line.

    ``--help`` and bad input end the process here.
    """
    open_streams()
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
    supervised()
    report(sys.argv[1:])


def report(argv: Sequence[str]) -> None:
    """Read the command line, and report heartbeats to the supervisor from now on."""
    try:
        recipe = read_once(tuple(argv))
    except BadInput as error:
        reject(error)
    except SystemExit as end:  # --help
        CHANNEL.send(ended=end.code or 0)
        raise

    # torch asks a visible GPU for its stream, even if the CPU trains: that would start CUDA.
    if recipe.machine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    CHANNEL.report(recipe.machine.patience)


read_once = cache(read)
""":func:`oneloop.recipe.parse.read`, once for each command line, as a tuple"""


def reject(error: BadInput | Unavailable) -> NoReturn:
    """Print the error on rank 0, and end this process with exit code 2 (Unavailable: 1)."""
    if is_main():
        print(printable(f"oneloop: {error}"), file=sys.stderr)
    leave(error.code, main=is_main())


def is_main() -> bool:
    """Return whether this is rank 0, from the launcher's variables (no accelerate import)."""
    return rank() == 0


def supervised() -> None:
    """Let a child continue as the training process; this process becomes its supervisor.

    If a debugger is attached, the process has no supervisor.
    """
    if sys.gettrace() is not None:
        return

    # This process may be that child.
    given = handed_over()
    if given is not None:
        _begin_training(given)
        return

    # Imported before the fork: after it, the supervisor must answer at once.
    from oneloop.supervise.ranks import Supervisors
    from oneloop.supervise.supervisor import Supervisor
    from oneloop.supervise.worker import Worker

    started_by = launcher()
    own = os.getpid()
    selector = selectors.DefaultSelector()
    peers = Supervisors(rank(), ranks(), selector)
    if ranks() > 1 and rank() == 0:
        peers.listen()

    # A socket for messages of both sides, and a pipe (read, write) for the worker's stacks.
    ours, theirs = socket.socketpair()
    stacks, dumped = os.pipe()

    # The child trains.
    pid = continue_in_child([theirs.fileno(), dumped])
    if pid == 0:
        ours.close()
        os.close(stacks)
        _begin_training([own, theirs.detach(), dumped])
        return

    # The parent supervises it, and exits with its code.
    theirs.close()
    os.close(dumped)
    worker = Worker(pid, Connection(ours, rank()), stacks)
    Supervisor(worker, peers, selector, started_by=started_by).run()


def _begin_training(given: Sequence[int]) -> None:
    """Prepare the training process.

    Args:
        given: id of the supervisor, and file descriptors: a socket for messages, a pipe for stacks.
    """
    parent, messages, dumped = given
    die_with(parent)
    on_stops(signal.SIG_DFL)  # until the run installs its handlers; nothing is written before
    CHANNEL.open(messages, dumped)


def open_streams() -> None:
    """Open standard streams that the shell has closed on /dev/null.

    Else other files would get their descriptors.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))
