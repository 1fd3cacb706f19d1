"""Which rank hangs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from oneloop.basics.heartbeats import ENDING, SAVING
from oneloop.supervise.crash_report import Cause

_TOLD = 10.0
"""seconds without a sign of life that a process has which was told to stop, where nothing is known of its steps"""
_SILENT = 5.0  # seconds without a report, from which on a process is called silent


@dataclass
class RankStatus:
    """How one process gets on."""

    rank: int
    phase: str = "set-up"
    count: int = 0  # signs of life so far
    since: float = 0.0  # seconds since the last one
    limit: float = float("inf")  # seconds that are usual, and as long as it is waited beyond
    median: float | None = None
    waits: bool = False  # for other processes
    where: str = ""
    patience: float = 1.0  # factor of all limits
    unit: str = ""  # number and name of the FSDP2 unit that ran last in this step
    held: bool = False  # by a person: not to be judged
    silent: float = 0.0  # seconds since the last report
    stopped: bool = False  # by SIGSTOP
    told: bool = False  # to stop

    def late(self, told: bool) -> bool:
        limit = self.limit
        if told and self.median is None and self.phase not in (SAVING, ENDING):
            limit = min(limit, self.patience * _TOLD)
        return not self.held and self.since > limit


def hung_ranks(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Those that stand still, and for whom all others wait; empty where any process gets on, or may yet.

    First those that do not even report, then those that do not wait for others, then those that are furthest behind.
    """
    if not statuses or any(one.held for one in statuses) or (len(statuses) == 1 and statuses[0].stopped):
        return []  # a run of one process that a person has stopped goes on when he likes
    told = any(one.told for one in statuses)
    if not all(one.late(told) for one in statuses):
        return []
    for chosen in ([one for one in statuses if one.silent > _SILENT], [one for one in statuses if not one.waits]):
        if chosen:
            return chosen
    least = min(one.count for one in statuses)
    return [one for one in statuses if one.count == least]


def other_units(statuses: Sequence[RankStatus]) -> str:
    """A likely cause if all ranks wait for one another: under FSDP2 they run different units."""
    if len({one.unit for one in statuses}) < 2 or not all(one.waits for one in statuses):
        return ""
    units = ", ".join(f"rank {one.rank} in unit call {one.unit or 'none'}" for one in statuses[:4])
    return f"; all wait, {units}: FSDP2 hangs if which units run, or how often, depends on the samples"


def sentence(standing: RankStatus) -> str:
    """What is said of one that stands still."""
    usual = f" (a step takes {standing.median:.2g} s)" if standing.median is not None else ""
    if standing.stopped:
        doing = "it is stopped (SIGSTOP)"
    elif standing.silent > _SILENT:
        doing = "it does not answer" + (f", last seen at {standing.where}" if standing.where else "")
    elif standing.where:
        doing = f"{'it waits for others' if standing.waits else 'it is'} at {standing.where}"
    else:
        doing = "nothing more is known"
    return f"rank {standing.rank} stands still in {standing.phase} for {standing.since:.0f} s{usual}: {doing}"


_GRACE = 10.0  # seconds from the word that a rank stands still to the end of the run
_HINT = "; if it only takes its time: --machine.patience 3"


class Watch:
    """The state of all ranks, as far as it is known."""

    def __init__(self, ranks: int, *, say: Callable[[str], None]) -> None:
        self.ranks, self._say = ranks, say
        self._standings: dict[int, tuple[float, RankStatus]] = {}
        self._done: set[int] = set()
        self._named: list[int] = []
        self._until = 0.0

    def hear(self, standing: RankStatus) -> None:
        """How one rank gets on, by its own word."""
        self._standings[standing.rank] = time.monotonic(), standing

    def ended(self, rank: int) -> None:
        """This one needs not be looked at any more."""
        self._done.add(rank)

    def has_ended(self, rank: int) -> bool:
        return rank in self._done

    def begin_afresh(self) -> None:
        """What was heard before says nothing: the machine stood still."""
        self._standings.clear()
        self._named = []

    def look(self, ask_for_stacks: Callable[[bool], None]) -> Cause | None:
        """Return why the run must end, or None; print before that which rank hangs. ``ask_for_stacks`` collects all
        stacks, with True also of stopped processes."""
        known = self._known()
        late = hung_ranks(known)
        if not late:
            if self._named:
                self._say(f"rank {', '.join(map(str, self._named))} continues")
                self._named = []
            return None
        said = "; ".join(map(sentence, late)) + other_units(known)
        if not self._named:
            grace = _GRACE * late[0].patience
            self._named, self._until = [one.rank for one in late], time.monotonic() + grace
            self._say(f"{said}; the run ends in {grace:.0f} s if that continues")
            ask_for_stacks(False)
            return None
        if time.monotonic() < self._until:
            return None
        ask_for_stacks(True)
        return Cause(late[0].rank, said + _HINT, stands=True)

    def _known(self) -> list[RankStatus]:
        """Of all ranks that have not ended; empty, as long as one has said nothing."""
        now, known = time.monotonic(), []
        for rank in set(range(self.ranks)) - self._done:
            if rank not in self._standings:
                return []
            at, told = self._standings[rank]
            one = RankStatus(**asdict(told))
            one.since += now - at
            one.silent += now - at
            known.append(one)
        return known
