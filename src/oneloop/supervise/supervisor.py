"""The watching process: it starts the training process, ends with its exit code, and ends it where it hangs."""

import os
import selectors
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED
from oneloop.basics.launcher import launcher_waits, on_stops, register_process, report_exit_code, stop_signals
from oneloop.supervise.crash_report import Cause, describe_exit, stopped_early, write_page, write_stacks, write_summary
from oneloop.supervise.hangs import RankStatus, Watch, describe_hang
from oneloop.supervise.pipe import TICK
from oneloop.supervise.ranks import Supervisors
from oneloop.supervise.worker import Worker

_LOOK = 0.25  # seconds from one look to the next
_ORPHAN = 10.0  # seconds that a training process has for a last checkpoint, once its launcher has gone
_EARLY = 5.0  # seconds that it has to end, when it is told to stop before the run has begun
_OVER = 60.0
"""seconds that it has to leave, once it has ended or rank 0 has: threads and exit handlers of other people's code"""
_LEAVING = 10.0  # the same, when it is told to stop meanwhile
_OTHERS = 1.0  # seconds in which other ranks may tell what the cause was


class Supervisor:
    """Watches one training process, and on rank 0 the run. ``started_by`` is the launcher's process id, if there is
    one."""

    def __init__(self, child: Worker, peers: Supervisors, selector: Any, *, started_by: int | None) -> None:
        self.child, self.peers, self._selector, self._started_by = child, peers, selector, started_by
        self.watch = Watch(peers.ranks, say=say)
        self._signals: list[int] = []
        self._stop_requested: tuple[float, str] | None = None  # since when this process is told to stop, and by what
        self._orphan = self._listens = False
        self._folder: Path | None = None  # of the run, once it has begun to write
        self._over = float("inf")  # since when there is nothing left to be done
        self._announced: int | None = None  # the exit code that the training process has told
        self._causes: list[Cause] = []
        self._decided = float("inf")  # when the cause is to be known
        self._hangs = False
        """whether rank 0 ends the run because of a hang: then no exit code of the training process counts"""
        self._rejected = float("inf")  # when a run ends that one rank has rejected
        self._stacks: dict[int, str] = {}
        self._awaited: set[int] = set()  # ranks whose stacks are asked for
        self._looked = self._sent = time.monotonic()

    def run(self) -> NoReturn:
        """Until the training process has ended; ends this one with its code."""
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
                for key, _ in self._selector.select(_LOOK):
                    self._read(key.data)
                self._look()
        except Exception:  # a fault of the watching is none of the training
            traceback.print_exc()
            say("this rank is no longer supervised, and continues")
        while self.child.alive() and not self._causes:
            time.sleep(_LOOK)
            while self._signals:
                self.child.signal(self._signals.pop(0))
        code = self.child.status
        if self._causes or code is None or code < 0:
            self._leave(ERROR)
        os._exit(code)  # it has told the launcher itself

    # --- what is heard ---

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
                self._listens = True
            case {"folder": folder}:
                self._folder = Path(folder)
            case {"watched_at": str() as place} if self.peers.rank != 0:
                self.peers.connect(place)
            case {"ended": code}:
                self._announced = code
                self._over = time.monotonic()
                self.watch.ended(self.peers.rank)
                self.peers.send(ended=code)
            case {"fault": fault}:
                self._found(Cause(self.child.rank, **fault))

    def _from_peer(self, rank: int, message: dict[str, Any] | None) -> None:
        match message:
            case None:
                if self._announced is None and not self.watch.has_ended(rank):
                    self._found(Cause(rank, f"rank {rank} and its supervisor process were killed", follows=True))
            case {"status": status}:
                self.watch.update(RankStatus(**status))
            case {"ended": code}:
                self.watch.ended(rank)
                self._over = time.monotonic() if rank == 0 else self._over
                if code == BAD_INPUT:  # found by that rank alone, if the others do not say the same at once
                    self._rejected = min(self._rejected, time.monotonic() + 3 * _OTHERS)
            case {"cause": cause}:
                self._found(Cause(**cause))
            case {"dump": wake}:
                self._hangs = wake
                self.peers.send(stacks=self.child.stacks(wake=wake))
                self._looked = time.monotonic()  # it was this process that took its time
            case {"stacks": text}:
                self._stacks[rank] = text or self._stacks.get(rank, "")
                self._awaited.discard(rank)
            case {"end": code}:
                self._leave(code)

    # --- what is done ---

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > 8 * _LOOK:  # this process hung itself: a person has stopped all, or the machine
            self.child.excuse()
            self.watch.reset()
        self._looked = now
        while self._signals:
            self._pass_on(self._signals.pop(0))
        if self._started_by not in (None, os.getppid()) and not self._orphan:
            self._orphan = True
            self._pass_on(signal.SIGTERM, by="its launcher, which has gone")
        if not self.child.alive():
            self._read(self.child)
            self._died()
        if self._stop_requested is not None:
            self._see_it_stop(now - self._stop_requested[0])
        self._see_it_leave(now)
        status = self.child.rank_status(stop_requested=self._stop_requested is not None)
        if status is not None and self._announced is None:
            unmet = self.peers.ranks > 1 and not self.peers.together
            if unmet and status.late(stop_requested=False):
                self._causes, self._decided = [Cause(status.rank, describe_hang(status), hung=True)], now
            self.watch.update(status)
            if self.peers.rank != 0 and now - self._sent > TICK:
                self._sent = now
                self.peers.send(status=asdict(status))
        if self.peers.rank == 0 and not self._causes and (cause := self.watch.look(self._ask_for_stacks)):
            self._causes, self._decided = [cause], now
        if now > self._decided:
            self._wreck()
        if now > self._rejected:
            self.peers.send(end=BAD_INPUT)
            self._leave(BAD_INPUT)

    def _pass_on(self, number: int, by: str = "") -> None:
        by = by or signal.Signals(number).name
        self._stop_requested = self._stop_requested or (time.monotonic(), by)
        if self._listens:
            self.child.signal(number)
        else:
            self._stop_early()

    def _see_it_stop(self, since: float) -> None:
        if self._folder is None and since > _EARLY and self._announced is None:
            self._stop_early()
        if self._orphan and since > _ORPHAN and not self._causes and not launcher_waits():
            words = f"rank {self.child.rank}: the launcher has gone, and {_ORPHAN:.0f} s were not enough to save"
            self._found(Cause(self.child.rank, words))
            if self.peers.rank == 0:
                self._wreck()

    def _see_it_leave(self, now: float) -> None:
        """Once it has ended, or rank 0 has: nobody stays behind."""
        late = now - self._over > (self.child.patience or float("inf")) * _OVER
        late |= self._stop_requested is not None and now - max(self._over, self._stop_requested[0]) > _LEAVING
        if late and self._announced is not None:
            say(f"rank {self.child.rank} has finished but does not exit (a thread or an exit handler); killing it")
            self._leave(self._announced)
        if late and not self._causes:
            self._found(Cause(self.child.rank, f"rank {self.child.rank} hangs, and rank 0 has ended"))

    def _stop_early(self) -> NoReturn:
        assert self._stop_requested is not None
        self.child.kill()
        if self.peers.rank == 0:
            say(stopped_early(self._stop_requested[1]))
        self.peers.send(end=STOPPED)
        self._leave(STOPPED)

    def _died(self) -> None:
        code = self.child.status
        assert code is not None
        if self._announced is not None:
            os._exit(ERROR if self._hangs else code if code >= 0 else self._announced)
        if not self._listens and -code in stop_signals():
            self._stop_requested = self._stop_requested or (time.monotonic(), signal.Signals(-code).name)
            self._stop_early()
        if not self._causes:
            stop_requested = self._stop_requested[1] if self._stop_requested else None
            self._found(Cause(self.child.rank, describe_exit(self.child.rank, code, stopped_by=stop_requested)))

    def _found(self, cause: Cause) -> None:
        """One reason for which the run ends. Rank 0 hears of all, and decides which was the first."""
        self._causes.append(cause)
        reports = self.peers.rank != 0 and self.peers.together
        if reports:
            self.peers.send(cause=asdict(cause))
        slow = reports or all(one.follows for one in self._causes)
        self._decided = min(self._decided, time.monotonic() + (3 if slow else 1) * _OTHERS)

    def _ask_for_stacks(self, wake: bool) -> None:
        """Of every rank; those that are stopped go on for it, with ``wake``."""
        self._hangs = wake
        self.peers.send(dump=wake)
        self._stacks[self.peers.rank] = self.child.stacks(wake=wake)
        self._awaited = {peer.rank for peer in self.peers.others if peer.rank is not None}
        until = time.monotonic() + 2.0
        while self._awaited and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                self._read(key.data)
        if self._folder is not None:
            write_stacks(self._folder, self._stacks)
        self._looked = time.monotonic()

    def _wreck(self) -> NoReturn:
        cause = next((one for one in self._causes if not one.follows), self._causes[0])
        alone = self.peers.rank == 0 or not self.peers.together
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
        quiet = report_exit_code(code) and (self.peers.ranks == 1 or self.peers.together or self.peers.others)
        os._exit(0 if quiet else code)


def say(words: str) -> None:
    """To a person, under whatever else stands there."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a bar has hidden the cursor
    print(f"oneloop: {words}", file=sys.stderr, flush=True)
