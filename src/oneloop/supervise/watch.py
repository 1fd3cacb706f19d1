"""Which rank hangs, why a run ended, and what is written into its folder then."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneloop.basics.beats import ENDING, SAVING
from oneloop.basics.errors import ERROR
from oneloop.basics.files import dumps, replacing, vouched

_HINTS = {
    signal.SIGKILL: "the kernel does so where memory runs out, and so do schedulers",
    signal.SIGSEGV: "a fault in native code; its stack is above",
    signal.SIGBUS: "memory or storage that is not there any more; the stack is above",
    signal.SIGABRT: "native code gave up; it says why above",
}
_EXITED = "some code called os._exit, or failed as it left"


@dataclass(frozen=True)
class Cause:
    """What one rank tells."""

    rank: int
    words: str
    text: str = ""  # its traceback
    follows: bool = False  # it only says that another rank has gone
    stands: bool = False  # a rank stands still

    @property
    def summary(self) -> dict[str, Any]:
        """Of the run."""
        return {"exit_reason": f"error: {self.words}", "exit_code": ERROR}


def of_a_death(rank: int, code: int, *, told: str | None) -> str:
    """Describe the end of a process without an error message: its exit code (negative: a signal), and the signal
    ``told`` before."""
    before = f", after it was told to stop by {told}" if told else ""
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and without a word{before}: {_EXITED}"
    try:
        by = signal.Signals(-code)
    except ValueError:
        return f"rank {rank} was killed by signal {-code}{before}"
    hint = _HINTS.get(by)
    return f"rank {rank} was killed by {by.name}{before}" + (f" ({hint})" if hint else "")


def stopped_early(by: str | None) -> str:
    """What is said of a run that was told to stop before it had begun."""
    return f"stopped by {by} before the run had begun; nothing was written"


_TOLD = 10.0
"""seconds without a sign of life that a process has which was told to stop, where nothing is known of its steps"""
_SILENT = 5.0  # seconds without a report, from which on a process is called silent


@dataclass
class Standing:
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


def culprits(standings: Sequence[Standing]) -> list[Standing]:
    """Those that stand still, and for whom all others wait; empty where any process gets on, or may yet.

    First those that do not even report, then those that do not wait for others, then those that are furthest behind.
    """
    if not standings or any(one.held for one in standings) or (len(standings) == 1 and standings[0].stopped):
        return []  # a run of one process that a person has stopped goes on when he likes
    told = any(one.told for one in standings)
    if not all(one.late(told) for one in standings):
        return []
    for chosen in ([one for one in standings if one.silent > _SILENT], [one for one in standings if not one.waits]):
        if chosen:
            return chosen
    least = min(one.count for one in standings)
    return [one for one in standings if one.count == least]


def other_units(standings: Sequence[Standing]) -> str:
    """A likely cause if all ranks wait for one another: under FSDP2 they run different units."""
    if len({one.unit for one in standings}) < 2 or not all(one.waits for one in standings):
        return ""
    units = ", ".join(f"rank {one.rank} in unit call {one.unit or 'none'}" for one in standings[:4])
    return f"; all wait, {units}: FSDP2 hangs if which units run, or how often, depends on the samples"


def sentence(standing: Standing) -> str:
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
        self._standings: dict[int, tuple[float, Standing]] = {}
        self._done: set[int] = set()
        self._named: list[int] = []
        self._until = 0.0

    def hear(self, standing: Standing) -> None:
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
        late = culprits(known)
        if not late:
            if self._named:
                self._say(f"rank {', '.join(map(str, self._named))} goes on")
                self._named = []
            return None
        said = "; ".join(map(sentence, late)) + other_units(known)
        if not self._named:
            grace = _GRACE * late[0].patience
            self._named, self._until = [one.rank for one in late], time.monotonic() + grace
            self._say(f"{said}; the run ends in {grace:.0f} s if that goes on")
            ask_for_stacks(False)
            return None
        if time.monotonic() < self._until:
            return None
        ask_for_stacks(True)
        return Cause(late[0].rank, said + _HINT, stands=True)

    def _known(self) -> list[Standing]:
        """Of all ranks that have not ended; empty, as long as one has said nothing."""
        now, known = time.monotonic(), []
        for rank in set(range(self.ranks)) - self._done:
            if rank not in self._standings:
                return []
            at, told = self._standings[rank]
            one = Standing(**asdict(told))
            one.since += now - at
            one.silent += now - at
            known.append(one)
        return known


STACKS = "stacks"  # the folder of them, in that of the run
_SECONDS = 3.0  # that the storage has
_PAGE = 10.0  # seconds that the page has


def leave_summary(folder: Path, content: Mapping[str, Any]) -> None:
    """summary.json of a run whose processes have gone."""

    def write() -> None:
        with replacing(folder / "summary.json") as draft:
            draft.write_text(dumps(vouched(content), indent=2) + "\n")
        (folder / "owner.json").unlink(missing_ok=True)

    _within(_SECONDS, write)


def leave_page(folder: Path) -> None:
    """The page of such a run, where it can be drawn in time."""
    command = [sys.executable, "-m", "oneloop.cli", "report", str(folder)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_PAGE, check=False)


def leave_stacks(folder: Path, stacks: Mapping[int, str]) -> None:
    """What each rank was doing, a file each."""

    def write() -> None:
        (folder / STACKS).mkdir(exist_ok=True)
        for rank, text in stacks.items():
            (folder / STACKS / f"rank-{rank:05d}.txt").write_text(text)

    _within(_SECONDS, write)


def _within(seconds: float, write: Callable[[], None]) -> bool:
    done = threading.Event()

    def tried() -> None:
        try:
            write()
            done.set()
        except OSError as error:
            print(f"oneloop: the run's folder cannot be written: {error}", file=sys.stderr)

    thread = threading.Thread(target=tried, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()
