"""Find the rank that hangs, from the status that every rank reports."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oneloop.supervise.crash_report import Cause, say

_SILENT = 5.0  # seconds without a report after which a process counts as silent


@dataclass
class RankStatus:
    """The last report of one rank."""

    rank: int
    phase: str = "set-up"  # of heartbeats.py
    count: int = 0  # heartbeats so far
    since: float = 0.0  # seconds since the last heartbeat
    limit: float = float("inf")  # hang limit in seconds
    median: float | None = None  # seconds of a step; None: unknown
    waits: bool = False  # whether it waits in a collective
    where: str = ""  # ``file:line in function``
    patience: float = 1.0  # factor of all limits
    unit: str = ""  # number and name of the FSDP2 unit that ran last in this step
    reads: str = ""  # what is being read, if it waits for data
    held: bool = False  # held by a debugger: never counts as hung
    silent: float = 0.0  # seconds since the last report
    stopped: bool = False  # whether SIGSTOP stopped it
    node: str = ""  # name of its node, if there are several

    def later(self, seconds: float) -> "RankStatus":
        """Return the status so many seconds later, if no report arrives."""
        return replace(self, since=self.since + seconds, silent=self.silent + seconds)

    @property
    def late(self) -> bool:
        """Whether its last heartbeat is too long ago; a stop request does not change that."""
        return not self.held and self.since > self.limit

    @property
    def waits_for_data(self) -> bool:
        """Whether storage may be slow, which does not count as a hang."""
        return bool(self.reads) and self.silent <= _SILENT


def hung_ranks(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that hang; empty if any rank makes progress or may still do so.

    These are the ranks that do not report, else those that do not wait in a collective, else the
    furthest behind.
    """
    if not statuses or any(status.held for status in statuses):
        return []
    # The user has stopped a run of one process, and can continue it.
    if len(statuses) == 1 and statuses[0].stopped:
        return []
    if not all(status.late for status in statuses):
        return []

    silent = [status for status in statuses if status.silent > _SILENT]
    if silent:
        return silent
    working = [status for status in statuses if not status.waits]
    if working:
        return working
    least = min(status.count for status in statuses)
    return [status for status in statuses if status.count == least]


def other_units(statuses: Sequence[RankStatus]) -> str:
    """Describe a likely cause if all ranks wait in collectives: they run different FSDP2 units."""
    units = {status.unit for status in statuses}
    if len(units) < 2 or not all(status.waits for status in statuses):
        return ""
    calls = [f"rank {status.rank} in unit call {status.unit or 'none'}" for status in statuses[:4]]
    return (
        f"; all wait, {', '.join(calls)}: FSDP2 hangs if which units run, or how often, depends on "
        "the samples"
    )


def describe_hang(status: RankStatus) -> str:
    """Describe a rank that hangs."""
    usual = f" (median step: {status.median:.2g} s)" if status.median is not None else ""
    if status.stopped:
        doing = "it is stopped (SIGSTOP)"
    elif status.silent > _SILENT:
        doing = "it does not respond"
        if status.where:
            doing += f", last seen at {status.where}"
    elif status.reads:
        doing = status.reads
    elif status.where and status.waits:
        doing = f"it waits for other ranks at {status.where}"
    elif status.where:
        doing = f"it is at {status.where}"
    else:
        doing = "no stack is known"
    if status.waits_for_data:
        return f"rank {status.rank} waits for data for {status.since:.0f} s{usual}: {doing}"
    return f"rank {status.rank} hangs in {status.phase} for {status.since:.0f} s{usual}: {doing}"


_GRACE = 10.0  # seconds between the report of a hang and the end of the run
_READING = 600.0  # seconds of waiting for data after which the run ends
_HINT = "; if the step is only slow, set --machine.patience 3"


class Watch:
    """The status of all ranks; reports hangs.

    Args:
        ranks: their number.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # the last report of each rank, and the time of it
        self._statuses: dict[int, tuple[float, RankStatus]] = {}
        self.ended: set[int] = set()  # ranks that have ended, and do not count from now on
        self.named: list[int] = []  # ranks that were reported as hung
        self._named_at = 0.0

    def update(self, status: RankStatus) -> None:
        """Store the report of one rank."""
        self._statuses[status.rank] = time.monotonic(), status

    def node(self, rank: int) -> str:
        """Return "; node NAME" for a rank, if there are several nodes."""
        _, status = self._statuses.get(rank, (0.0, RankStatus(rank)))
        return f"; node {status.node}" if status.node else ""

    def reset(self) -> None:
        """Forget all reports: the machine was suspended."""
        self._statuses.clear()
        self.named = []

    def look(self, ask_for_stacks: Callable[[bool], None]) -> Cause | None:
        """Return why the run must end, or None; print before that which rank hangs.

        ``ask_for_stacks`` collects all stacks, with True also of stopped processes.
        """
        # Nothing is known until every running rank has reported.
        now = time.monotonic()
        known = []
        for rank in set(range(self.ranks)) - self.ended:
            if rank not in self._statuses:
                return None
            # Add the time since the report.
            at, status = self._statuses[rank]
            known.append(status.later(now - at))
        late = hung_ranks(known)

        # No rank hangs, or none any more.
        if not late:
            if self.named:
                say(f"rank {', '.join(map(str, self.named))} continues")
                self.named = []
            return None

        # Report a hang, and give the rank some more time.
        text = "; ".join(map(describe_hang, late)) + other_units(known)
        if not self.named:
            self.named = [hung.rank for hung in late]
            self._named_at = time.monotonic()
            left = self._left(late)
            say(f"{text}; the run ends in {left:.0f} s if it does not continue")
            ask_for_stacks(False)
            return None
        if self._left(late) > 0:
            return None

        # End the run.
        ask_for_stacks(True)
        return Cause(late[0].rank, text + _HINT)

    def _left(self, late: Sequence[RankStatus]) -> float:
        """Return the seconds until the run ends if these ranks do not continue."""
        patience = late[0].patience
        left = self._named_at + patience * _GRACE - time.monotonic()
        if all(status.waits_for_data for status in late):
            left = max(left, patience * _READING - max(status.since for status in late))
        return left
