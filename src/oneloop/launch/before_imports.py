"""What a run does before the slow imports: it is watched from then on, and tells of bad input at once."""

import os
import selectors
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.basics.launcher import die_with, launcher, on_stops, rank, ranks
from oneloop.launch.signals import leave
from oneloop.recipe.parse import read
from oneloop.recipe.schema import Recipe
from oneloop.supervise.pipe import LINK
from oneloop.supervise.ranks import Supervisors
from oneloop.supervise.supervisor import Supervisor
from oneloop.supervise.worker import Worker


def begin() -> None:
    """Reads the command line, in a process that is watched from now on; ``--help`` and bad input end here."""
    open_streams()
    supervised()
    report(sys.argv[1:])


def report(argv: Sequence[str]) -> None:
    """Reads these words, and tells from now on how this process gets on, where it is watched."""
    try:
        recipe = read_once(tuple(argv))
    except BadInput as error:
        reject(error)
    except SystemExit as end:  # --help
        LINK.send(ended=end.code or 0)
        raise
    LINK.report(recipe.machine.patience)


@cache
def read_once(argv: tuple[str, ...]) -> Recipe:
    """:func:`oneloop.recipe.parse.read`, once for each command line."""
    return read(argv)


def reject(error: BadInput) -> NoReturn:
    """Says what was wrong, on rank 0, and ends this process."""
    if is_main():
        print(printable(f"oneloop: {error}"), file=sys.stderr)
    leave(exit_codes.BAD_INPUT, main=is_main())


def is_main() -> bool:
    """Whether this is rank 0, by the launcher's word: accelerate need not be there yet."""
    return rank() == 0


def supervised() -> None:
    """Goes on in a process of its own, and watches it from this one. Returns in the new one.

    A debugger that has this process keeps it: then nothing watches.
    """
    if sys.gettrace() is not None or not hasattr(os, "fork"):
        return
    started_by, own = launcher(), os.getpid()
    selector = selectors.DefaultSelector()
    peers = Supervisors(rank(), ranks(), selector)
    if ranks() > 1 and rank() == 0:
        peers.listen()
    (reports, reporting), (stacks, dumped) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with(own)
        on_stops(signal.SIG_DFL)  # until it listens itself: nothing has been written by then
        for handle in (reports, stacks):
            os.close(handle)
        LINK.open(reporting, dumped)
        return
    for handle in (reporting, dumped):
        os.close(handle)
    Supervisor(Worker(pid, reports, stacks, rank()), peers, selector, started_by=started_by).run()


def open_streams() -> None:
    """Standard streams that the shell has closed go nowhere: their numbers are no other file's then."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
