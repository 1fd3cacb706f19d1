"""The supervisor process: watches the training process, ends it if it hangs, and exits like it.

Rank 0's supervisor decides why and when the run ends.
"""

import os
import selectors
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, INTERRUPTED, STOPPED
from oneloop.basics.launcher import HOST, launcher_waits, register_process, report_exit_code
from oneloop.basics.system.signals import AT_ONCE, on_stops, stop_signals
from oneloop.supervise.crash_report import (
    Cause,
    describe_exit,
    say,
    stop_name,
    stopped_early,
    write_page,
    write_stacks,
    write_summary,
)
from oneloop.supervise.hangs import RankStatus, Watch, describe_hang
from oneloop.supervise.pipe import TICK
from oneloop.supervise.ranks import Supervisors
from oneloop.supervise.worker import Worker

_NEVER = float("inf")
_INTERVAL = 0.25  # seconds between two checks
_ORPHAN = 10.0  # seconds for a last checkpoint after the launcher has ended
_EARLY = 5.0  # seconds to exit if a stop is requested before the run begins
# seconds to exit after this rank or rank 0 has finished: threads and exit handlers of the user
_OVER = 60.0
_OTHERS = 1.0  # seconds to wait for causes from other ranks


class Supervisor:
    """Watches one training process and, on rank 0, the whole run.

    Args:
        child: the training process.
        peers: connections to the other supervisors.
        selector: waits for messages from both.
        started_by: process id of the launcher; None: there is none.
    """

    def __init__(
        self, child: Worker, peers: Supervisors, selector: Any, *, started_by: int | None
    ) -> None:
        self.rank = peers.rank
        self.child = child
        self.peers = peers
        self._selector = selector
        self._started_by = started_by
        self.watch = Watch(peers.ranks)

        # Requests to stop.
        self._signals: list[int] = []  # that have arrived, and are not yet forwarded
        self._stopped_by = ""  # the name of the first signal, or words
        self._stopped_at = _NEVER  # when it arrived
        self._interrupted_at = _NEVER  # when the first Ctrl-C arrived
        self._orphan = False  # whether the launcher has ended
        self._child_listens = False  # whether the training process handles signals

        # What the training process reported.
        self._folder: Path | None = None  # the run folder, once the run writes to it
        self._finished_at = _NEVER  # when this rank or rank 0 finished
        self._reported_code: int | None = None  # its exit code

        # Why the run ends.
        self._causes: list[Cause] = []
        self._decide_at = _NEVER  # when the cause is decided
        self._rejected = _NEVER  # when the run ends because one rank has bad input
        self._hangs = False  # the run ends because of a hang: ignore the process's exit code
        self._stacks: dict[int, str] = {}
        self._missing_stacks: set[int] = set()  # ranks whose stacks have not arrived

        self._last_check = time.monotonic()
        self._last_sent = self._last_check  # the last message to the other supervisors

    def run(self) -> NoReturn:
        """Watch until the training process has ended; exit with its code."""
        # Wake up at once for signals (also SIGCHLD), messages and connections.
        wake, woken = os.pipe()
        for handle in (wake, woken):
            os.set_blocking(handle, False)
        on_stops(lambda number, _: self._signals.append(number))
        register_process()
        signal.signal(signal.SIGCHLD, lambda number, _: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 1 << 12))
        self._selector.register(self.child.connection.link, selectors.EVENT_READ, self._read_child)
        self.peers.handle = self._from_peer

        # Watch; an error in it must not stop the training.
        try:
            while True:
                self._wait(_INTERVAL)
                self._check()
        except Exception:
            traceback.print_exc()
            say("this rank is no longer supervised, and continues")

        # After such an error, only forward signals.
        while self.child.alive() and not self._causes:
            time.sleep(_INTERVAL)
            while self._signals:
                self.child.signal(self._signals.pop(0))
        code = self.child.status
        if self._causes or code is None or code < 0:
            code = ERROR
        self._leave(code)

    def _wait(self, seconds: float) -> None:
        """Wait for signals, messages and connections, and handle them."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def _read_child(self) -> None:
        """Handle the messages of the training process."""
        for message in self.child.connection.received() or ():
            match message:
                case {"beat": beat}:
                    self.child.reported = RankStatus(self.rank, **beat)
                case {"listens": _}:
                    self._child_listens = True
                case {"folder": folder}:
                    self._folder = Path(folder) if folder else None  # None: it was moved
                case {"watched_at": str() as address} if self.rank != 0:
                    self.peers.connect(address)
                case {"ended": code}:
                    self._reported_code = code
                    self._finished_at = time.monotonic()
                    self.watch.ended.add(self.rank)
                    self.peers.send(ended=code)
                case {"fault": fault}:
                    self._add_cause(Cause(self.rank, **fault))

    def _from_peer(self, rank: int, message: dict[str, Any] | None) -> None:
        """Handle a message of another supervisor; None: its connection was closed."""
        match message:
            case None:
                if self._reported_code is None and rank not in self.watch.ended:
                    words = f"rank {rank} and its supervisor process were killed"
                    self._add_cause(Cause(rank, words, follows=True))
            case {"status": status}:
                self.watch.update(RankStatus(**status))
            case {"ended": code}:
                self.watch.ended.add(rank)
                if rank == 0:
                    self._finished_at = time.monotonic()
                # If other ranks do not report the same soon, only that rank found it.
                if code == BAD_INPUT:
                    self._rejected = time.monotonic() + 3 * _OTHERS
            case {"cause": cause}:
                self._add_cause(Cause(**cause))
            case {"dump": wake}:
                self._hangs = wake
                self.peers.send(stacks=self.child.stacks(wake=wake))
                self._last_check = time.monotonic()  # collecting the stacks took the time
                self.peers.reset_timers()
            case {"stacks": text}:
                if text:
                    self._stacks[rank] = text
                self._missing_stacks.discard(rank)
            case {"end": code}:
                self._leave(code)

    def _check(self) -> None:
        """Look at everything that changes with time; runs four times a second."""
        now = time.monotonic()

        # This process was stopped too: by the user, or with the machine.
        if now - self._last_check > 8 * _INTERVAL:
            self.child.reset_timers()
            self.watch.reset()
            self.peers.reset_timers(stopped_for=now - self._last_check)
        self._last_check = now
        if self._causes and self.peers.gave_this_up:
            say(f"rank {self.rank} was stopped, and the other nodes ended without it")
            self._leave(ERROR)

        # Forward signals, and stop if the launcher has ended.
        while self._signals:
            self._forward(self._signals.pop(0))
        if self._started_by not in (None, os.getppid()) and not self._orphan:
            self._orphan = True
            # the other nodes go on without this one
            if HOST in os.environ and not self._stopped_by:
                words = f"the launcher of rank {self.rank} was killed"
                self._add_cause(Cause(self.rank, words))
            else:
                self._forward(signal.SIGTERM, by="its launcher, which has gone")

        # The end of the training process; read its last messages first.
        if not self.child.alive():
            self._read_child()
            self._child_ended()

        # A run that does not stop after a request.
        since = now - self._stopped_at
        if self._folder is None and since > _EARLY and self._reported_code is None:
            self._stop_early()
        if self._orphan and since > _ORPHAN and not self._causes and not launcher_waits():
            words = (
                f"rank {self.rank}: the launcher has gone, and {_ORPHAN:.0f} s were not "
                "enough to save"
            )
            self._add_cause(Cause(self.rank, words))

        # It, or rank 0, has finished, and this rank does not exit.
        if now - self._finished_at > self.child.patience * _OVER:
            if self._reported_code is not None:
                say(
                    f"rank {self.rank} has finished but does not exit (a thread or an exit "
                    "handler); killing it"
                )
                self._leave(self._reported_code)
            if not self._causes:
                words = f"rank {self.rank} hangs, and rank 0 has ended"
                self._add_cause(Cause(self.rank, words))

        # Note the status of this rank, and send it to rank 0; that sends its own to all.
        status = self.child.rank_status()
        if self._reported_code is None:
            # Without a connection, this supervisor decides alone.
            if not self.peers.all_connected and not self._causes and status.late:
                self._end_with_error(Cause(self.rank, describe_hang(status)))
            self.watch.update(status)
        if now - self._last_sent > TICK:
            self._last_sent = now
            self.peers.send(status=asdict(status))

        # Find hangs, and lost ranks.
        lost = self.peers.lost(self.child.patience)
        if lost and not self._causes and not self.watch.named:
            self._add_cause(lost)
        if self.rank == 0 and not self._causes:
            cause = self.watch.look(self._ask_for_stacks)
            if cause:
                self._end_with_error(cause)

        # End the run. The first cause counts that is not a mere consequence.
        if now > self._decide_at:
            causes = [cause for cause in self._causes if not cause.follows]
            self._end_with_error((causes or self._causes)[0])
        if now > self._rejected:
            self.peers.send(end=BAD_INPUT)
            self._leave(BAD_INPUT)

    def _forward(self, number: int, by: str = "") -> None:
        """Pass a stop request on to the training process; before it listens, end it."""
        by = by or stop_name(number)
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted_at > AT_ONCE:
            # A second Ctrl-C ends all ranks, whatever they do.
            say("ended by a second Ctrl-C: the steps after the last checkpoint are lost")
            self.peers.send(end=INTERRUPTED)
            self._leave(INTERRUPTED)
        if by == stop_name(signal.SIGINT):
            self._interrupted_at = min(self._interrupted_at, now)
        self._request_stop(by)
        if self._child_listens:
            self.child.signal(number)
        else:
            self._stop_early()

    def _request_stop(self, by: str) -> None:
        if not self._stopped_by:
            self._stopped_by = by
            self._stopped_at = time.monotonic()

    def _stop_early(self) -> NoReturn:
        """End a run that was stopped before it began."""
        self.child.kill()
        if self.rank == 0:
            say(stopped_early(self._stopped_by))
        self.peers.send(end=STOPPED)
        self._leave(STOPPED)

    def _child_ended(self) -> None:
        """Exit like the training process, or find out why it has ended."""
        code = self.child.status
        assert code is not None

        # It has reported its exit code: the run has ended.
        if self._reported_code is not None:
            if self._hangs:
                os._exit(ERROR)
            os._exit(code if code >= 0 else self._reported_code)

        # A stop signal has killed it before it listened.
        if not self._child_listens and -code in stop_signals():
            self._request_stop(stop_name(-code))
            self._stop_early()

        # It has crashed; another rank's report may come first.
        if not any(cause.rank == self.rank for cause in self._causes):
            words = describe_exit(self.rank, code, stopped_by=self._stopped_by)
            self._add_cause(Cause(self.rank, words))

    def _add_cause(self, cause: Cause) -> None:
        """Add a cause for the end of the run.

        Rank 0 gets all causes, and decides which was first.
        """
        self._causes.append(cause)
        reports = self.rank != 0 and self.peers.all_connected
        if reports:
            self.peers.send(cause=asdict(cause))

        # Wait longer for rank 0's decision, and for the cause of a mere consequence.
        wait = _OTHERS
        if reports or all(known.follows for known in self._causes):
            wait = 3 * _OTHERS
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    def _ask_for_stacks(self, wake: bool) -> None:
        """Collect the stacks of every rank; ``wake`` continues stopped processes for it."""
        # Ask the other ranks, and this one meanwhile.
        self._hangs = wake
        self.peers.send(dump=wake)
        self._stacks[self.rank] = self.child.stacks(wake=wake)
        self._missing_stacks = {peer.rank for peer in self.peers.others}

        # Wait for the others.
        until = time.monotonic() + 2.0
        while self._missing_stacks and time.monotonic() < until:
            self._wait(0.1)
        if self._folder is not None:
            write_stacks(self._folder, self._stacks)
        self._last_check = time.monotonic()  # not stopped

    def _end_with_error(self, cause: Cause) -> NoReturn:
        """End the run on all ranks, and report the cause."""
        reason = f"error: {cause.words}{self.watch.node(cause.rank)}"

        # Rank 0 reports for all, if it can.
        alone = self.rank == 0 or not self.peers.all_connected or cause.rank == 0
        self.peers.send(end=ERROR)
        self.child.kill()

        # Write the summary first, and last the page, which takes longer.
        folder = self._folder if alone and 0 not in self.watch.ended else None
        if folder is not None:
            write_summary(folder, reason)
        if alone:
            print(cause.text, end="", file=sys.stderr)
            say(reason)
        if folder is not None:
            write_page(folder)
        self._leave(ERROR)

    def _leave(self, code: int) -> NoReturn:
        """End the training process, and exit; with 0 if the launcher gets the code by a file."""
        self.child.kill()
        known = report_exit_code(code)
        alone = not self.peers.all_connected and not self.peers.others
        os._exit(0 if known and not alone else code)
