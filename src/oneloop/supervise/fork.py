"""From one process two: one that trains, and one that watches it."""

import os
import selectors
import signal
import sys

from oneloop.basics.launcher import die_with, launcher, on_stops, rank, ranks
from oneloop.supervise.link import LINK
from oneloop.supervise.peers import Peers
from oneloop.supervise.supervisor import Supervisor
from oneloop.supervise.trainee import Trainee


def supervised() -> None:
    """Goes on in a process of its own, and watches it from this one. Returns in the new one.

    A debugger that has this process keeps it: then nothing watches.
    """
    if sys.gettrace() is not None or not hasattr(os, "fork"):
        return
    started_by, own = launcher(), os.getpid()
    selector = selectors.DefaultSelector()
    peers = Peers(rank(), ranks(), selector)
    if ranks() > 1 and rank() == 0:
        peers.listen()
    (reports, told), (stacks, dumped) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with(own)
        on_stops(signal.SIG_DFL)  # until it listens itself: nothing has been written by then
        for handle in (reports, stacks):
            os.close(handle)
        LINK.open(told, dumped)
        return
    for handle in (told, dumped):
        os.close(handle)
    Supervisor(Trainee(pid, reports, stacks, rank()), peers, selector, started_by=started_by).run()


def open_streams() -> None:
    """Standard streams that the shell has closed go nowhere: their numbers are no other file's then."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
