"""The supervisor process: watches the training process, ends it if it hangs, and exits with its
exit code."""

import os
import selectors
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED
from oneloop.basics.launcher import (
    HOST,
    launcher_waits,
    on_stops,
    register_process,
    report_exit_code,
    stop_signals,
)
from oneloop.supervise.crash_report import (
    Cause,
    describe_exit,
    stopped_early,
    write_page,
    write_stacks,
    write_summary,
)
from oneloop.supervise.hangs import RankStatus, Watch, describe_hang
from oneloop.supervise.pipe import TICK
from oneloop.supervise.ranks import Supervisors
from oneloop.supervise.worker import Worker

_INTERVAL = 0.25  # seconds between two checks
_ORPHAN = 10.0  # seconds for a last checkpoint after the launcher has ended
_EARLY = 5.0  # seconds to exit if a stop is requested before the run begins
# seconds to exit after this rank or rank 0 has finished, for threads and exit handlers of the
# user's code
_OVER = 60.0
_LEAVING = 10.0  # the same, if a stop is requested meanwhile
_LOST = 8.0  # seconds without a message after which a rank on another node counts as lost
_OTHERS = 1.0  # seconds to wait for causes from other ranks


class Supervisor:
    """Watches one training process and, on rank 0, the whole run. ``started_by``: the launcher's
    process id or None."""

    def __init__(
        self, child: Worker, peers: Supervisors, selector: Any, *, started_by: int | None
    ) -> None:
        self.child, self.peers, self._selector, self._started_by = (
            child,
            peers,
            selector,
            started_by,
        )
        self.watch = Watch(peers.ranks, say=say)
        self._signals: list[int] = []
        self._stop_requested: tuple[float, str] | None = None  # (time, source) of the stop request
        self._orphan = self._child_listens = False
        self._folder: Path | None = None  # the run folder, once the run writes to it
        self._finished_at = float("inf")  # when this rank or rank 0 finished
        self._reported_code: int | None = None  # exit code that the training process reported
        self._causes: list[Cause] = []
        self._decide_at = float("inf")  # when the cause is decided
        self._hangs = False
        """whether rank 0 ends the run because of a hang; then the training process's exit code is
        ignored"""
        self._rejected = float("inf")  # when the run ends because one rank has bad input
        self._stacks: dict[int, str] = {}
        self._missing_stacks: set[int] = set()  # ranks whose stacks have not arrived
        self._last_check = self._last_sent = time.monotonic()

    def run(self) -> NoReturn:
        """Watch until the training process has ended; exit with its code."""
        wake, woken = os.pipe()
        for handle in (wake, woken):
            os.set_blocking(handle, False)
        on_stops(lambda number, _: self._signals.append(number))
        register_process()
        signal.signal(signal.SIGCHLD, lambda number, _: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ, wake)
        self._selector.register(self.child.reports, selectors.EVENT_READ, self.child)
        self.peers.watch()
        try:
            while True:
                for key, _ in self._selector.select(_INTERVAL):
                    self._read(key.data)
                self._check()
        except Exception:  # an error of the supervisor must not stop the training
            traceback.print_exc()
            say("this rank is no longer supervised, and continues")
        while self.child.alive() and not self._causes:
            time.sleep(_INTERVAL)
            while self._signals:
                self.child.signal(self._signals.pop(0))
        code = self.child.status
        if self._causes or code is None or code < 0:
            self._leave(ERROR)
        os._exit(code)  # the training process has reported it to the launcher

    def _read(self, source: Any) -> None:
        if isinstance(source, int):
            with suppress(BlockingIOError):
                os.read(source, 1 << 12)
        elif source is self.child:
            for message in self.child.messages():
                self._from_child(message)
        else:
            for rank, message in self.peers.read(source):
                self._from_peer(rank, message)

    def _from_child(self, message: dict[str, Any]) -> None:
        match message:
            case {"listens": _}:
                self._child_listens = True
            case {"folder": folder}:
                self._folder = Path(folder)
            case {"watched_at": str() as address} if self.peers.rank != 0:
                self.peers.connect(address)
            case {"ended": code}:
                self._reported_code = code
                self._finished_at = time.monotonic()
                self.watch.ended(self.peers.rank)
                self.peers.send(ended=code)
            case {"fault": fault}:
                self._add_cause(Cause(self.child.rank, **fault))

    def _from_peer(self, rank: int, message: dict[str, Any] | None) -> None:
        match message:
            case None:
                if self._reported_code is None and not self.watch.has_ended(rank):
                    self._add_cause(
                        Cause(
                            rank,
                            f"rank {rank} and its supervisor process were killed",
                            follows=True,
                        )
                    )
            case {"host": str() as host}:
                self.peers.hosts[rank] = host
            case {"status": status}:
                self.watch.update(RankStatus(**status))
            case {"ended": code}:
                self.watch.ended(rank)
                self._finished_at = time.monotonic() if rank == 0 else self._finished_at
                # if other ranks do not report the same soon, only that rank found it
                if code == BAD_INPUT:
                    self._rejected = min(self._rejected, time.monotonic() + 3 * _OTHERS)
            case {"cause": cause}:
                self._add_cause(Cause(**cause))
            case {"dump": wake}:
                self._hangs = wake
                self.peers.send(stacks=self.child.stacks(wake=wake))
                self._last_check = time.monotonic()  # collecting the stacks took the time
                self.peers.reset_timers()
            case {"stacks": text}:
                self._stacks[rank] = text or self._stacks.get(rank, "")
                self._missing_stacks.discard(rank)
            case {"end": code}:
                self._leave(code)

    def _check(self) -> None:
        now = time.monotonic()
        # this process was stopped too: by the user, or with the machine
        if now - self._last_check > 8 * _INTERVAL:
            self.child.reset_timers()
            self.watch.reset()
            self.peers.reset_timers()
        self._last_check = now
        while self._signals:
            self._forward(self._signals.pop(0))
        if self._started_by not in (None, os.getppid()) and not self._orphan:
            self._orphan = True
            if HOST in os.environ:  # the other nodes go on without this one
                self._add_cause(
                    Cause(self.child.rank, f"the launcher of rank {self.child.rank} was killed")
                )
            else:
                self._forward(signal.SIGTERM, by="its launcher, which has gone")
        if not self.child.alive():
            self._read(self.child)
            self._child_ended()
        if self._stop_requested is not None:
            self._check_stop(now - self._stop_requested[0])
        self._check_exit(now)
        status = self.child.rank_status(stop_requested=self._stop_requested is not None)
        if status is not None and self._reported_code is None:
            unmet = self.peers.ranks > 1 and not self.peers.all_connected
            if unmet and status.late(stop_requested=False):
                self._causes, self._decide_at = (
                    [Cause(status.rank, describe_hang(status), hung=True)],
                    now,
                )
            self.watch.update(status)
        if now - self._last_sent > TICK:
            self._last_sent = now
            if status is not None and self.peers.rank != 0:
                self.peers.send(status=asdict(status))
            else:
                self.peers.send(host=os.environ.get(HOST, ""))
        if (
            not self._causes
            and not self.watch.named
            and (lost := self.peers.lost(_LOST * (self.child.patience or float("inf"))))
        ):
            words = (
                f"rank {lost.rank} does not answer for {now - lost.heard:.0f} s: its node or the "
                "link to it is lost"
            )
            self._add_cause(Cause(lost.rank or 0, words))
        if (
            self.peers.rank == 0
            and not self._causes
            and (cause := self.watch.look(self._ask_for_stacks))
        ):
            self._causes, self._decide_at = [cause], now
        if now > self._decide_at:
            self._end_with_error()
        if now > self._rejected:
            self.peers.send(end=BAD_INPUT)
            self._leave(BAD_INPUT)

    def _forward(self, number: int, by: str = "") -> None:
        by = by or signal.Signals(number).name
        self._stop_requested = self._stop_requested or (time.monotonic(), by)
        if self._child_listens:
            self.child.signal(number)
        else:
            self._stop_early()

    def _check_stop(self, since: float) -> None:
        if self._folder is None and since > _EARLY and self._reported_code is None:
            self._stop_early()
        if self._orphan and since > _ORPHAN and not self._causes and not launcher_waits():
            words = (
                f"rank {self.child.rank}: the launcher has gone, and {_ORPHAN:.0f} s were not "
                "enough to save"
            )
            self._add_cause(Cause(self.child.rank, words))
            if self.peers.rank == 0:
                self._end_with_error()

    def _check_exit(self, now: float) -> None:
        """Kill this rank if it does not exit after it, or rank 0, has finished."""
        late = now - self._finished_at > (self.child.patience or float("inf")) * _OVER
        late |= (
            self._stop_requested is not None
            and now - max(self._finished_at, self._stop_requested[0]) > _LEAVING
        )
        if late and self._reported_code is not None:
            say(
                f"rank {self.child.rank} has finished but does not exit (a thread or an exit "
                "handler); killing it"
            )
            self._leave(self._reported_code)
        if late and not self._causes:
            self._add_cause(
                Cause(self.child.rank, f"rank {self.child.rank} hangs, and rank 0 has ended")
            )

    def _stop_early(self) -> NoReturn:
        assert self._stop_requested is not None
        self.child.kill()
        if self.peers.rank == 0:
            say(stopped_early(self._stop_requested[1]))
        self.peers.send(end=STOPPED)
        self._leave(STOPPED)

    def _child_ended(self) -> None:
        code = self.child.status
        assert code is not None
        if self._reported_code is not None:
            os._exit(ERROR if self._hangs else code if code >= 0 else self._reported_code)
        if not self._child_listens and -code in stop_signals():
            self._stop_requested = self._stop_requested or (
                time.monotonic(),
                signal.Signals(-code).name,
            )
            self._stop_early()
        # another rank's report may come first
        if not any(cause.rank == self.child.rank for cause in self._causes):
            stop_requested = self._stop_requested[1] if self._stop_requested else None
            self._add_cause(
                Cause(
                    self.child.rank, describe_exit(self.child.rank, code, stopped_by=stop_requested)
                )
            )

    def _add_cause(self, cause: Cause) -> None:
        """Add a cause for the end of the run. Rank 0 gets all causes, and decides which was
        first."""
        self._causes.append(cause)
        reports = self.peers.rank != 0 and self.peers.all_connected
        if reports:
            self.peers.send(cause=asdict(cause))
        slow = reports or all(cause.follows for cause in self._causes)
        self._decide_at = min(self._decide_at, time.monotonic() + (3 if slow else 1) * _OTHERS)

    def _ask_for_stacks(self, wake: bool) -> None:
        """Collect the stacks of every rank; ``wake`` continues stopped processes for it."""
        self._hangs = wake
        self.peers.send(dump=wake)
        self._stacks[self.peers.rank] = self.child.stacks(wake=wake)
        self._missing_stacks = {peer.rank for peer in self.peers.others if peer.rank is not None}
        until = time.monotonic() + 2.0
        while self._missing_stacks and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                self._read(key.data)
        if self._folder is not None:
            write_stacks(self._folder, self._stacks)
        self._last_check = time.monotonic()

    def _end_with_error(self) -> NoReturn:
        cause = next((cause for cause in self._causes if not cause.follows), self._causes[0])
        cause = replace(cause, words=cause.words + self.peers.on(cause.rank))
        alone = self.peers.rank == 0 or not self.peers.all_connected or cause.rank == 0
        self.peers.send(end=ERROR)
        self.child.kill()
        folder = self._folder if alone and not self.watch.has_ended(0) else None
        if folder is not None:
            write_summary(folder, cause.summary)
        if alone:
            print(cause.text, end="", file=sys.stderr)
            say(cause.summary["exit_reason"])
        if folder is not None:
            write_page(folder)
        self._leave(ERROR)

    def _leave(self, code: int) -> NoReturn:
        self.child.kill()
        quiet = report_exit_code(code) and (
            self.peers.ranks == 1 or self.peers.all_connected or self.peers.others
        )
        os._exit(0 if quiet else code)


def say(words: str) -> None:
    """Print a message to the terminal, below the progress bars."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # show the cursor that a bar has hidden
    print(f"oneloop: {words}", file=sys.stderr, flush=True)
