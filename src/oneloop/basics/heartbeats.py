"""Heartbeats: the phase of this process and the time of its last progress, for the supervisor.

>>> with BEATS.phase("evaluation"):
...     for batch in batches:
...         BEATS.beat()
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

# the phases
SET_UP = "set-up"
TRAINING = "training"
EPOCH = "training (new epoch)"
EVALUATION = "evaluation"
METRICS = "evaluation (metrics)"
GENERATION = "evaluation (generation)"
SAVING = "saving"
LOADING = "loading a checkpoint"
ENDING = "ending"

_FIRST = 600.0
"""hang limit in seconds until enough intervals are measured (the first step may compile)"""
_SLOW = 1800.0  # that of phases without steps
_LEARNS = (TRAINING, EPOCH, EVALUATION, GENERATION)  # phases that consist of similar steps
_WARM = 2  # first intervals of a phase, which are not typical
_ENOUGH = 3  # intervals needed after them
_AT_LEAST = 9.0  # minimum seconds beyond the longest interval


class Beats:
    """The last heartbeat of a process, and the usual intervals between heartbeats."""

    def __init__(self) -> None:
        self.now_in = SET_UP  # the current phase
        self.count = 0  # heartbeats so far
        self.unit = ""  # number and name of the FSDP2 unit that ran last in this step
        self.last = monotonic()
        # describes what is being read, while the process waits for data; empty: it does not
        self.reads: Callable[[], str] = str
        self.changed: Callable[[], None] = lambda: None  # called at the start of every phase
        # seconds between heartbeats, by phase
        self._known: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))
        self._current = self._known[SET_UP]
        # whether the next beat may take long: it is the first one of an evaluation, in which a data
        # set may do slow work, or a process starts
        self._opening = False

    def beat(self) -> None:
        """Record progress; costs about half a microsecond."""
        now = monotonic()
        if self._opening:
            self._opening = False
        else:
            self._current.append(now - self.last)
        self.last = now
        self.count += 1

    def wait_for_start(self) -> None:
        """Allow the next beat to take as long as the first one of its phase: a process starts."""
        self._opening = True
        self.last = monotonic()
        self.changed()

    def moved(self) -> None:
        """Record that bytes were read or written, from any thread: progress of all but steps."""
        if self.now_in not in _LEARNS:
            self.last = monotonic()

    def enter(self, phase: str) -> None:
        """Switch to this phase."""
        self.now_in = phase
        self._current = self._known[phase]
        self._opening = phase == EVALUATION
        self.last = monotonic()
        self.count += 1
        self.changed()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Switch to this phase in the context, then back."""
        before = self.now_in
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def usual(self) -> tuple[float, float] | None:
        """Return the median and the longest of this phase's last 200 intervals, in seconds.

        None if too few are known.
        """
        known = list(self._current)
        # The first step of an epoch has its own phase; in short epochs, most steps are of it.
        if self.now_in == TRAINING and len(known) < _WARM + _ENOUGH:
            known = [*self._known[EPOCH], *known]
        if self.now_in not in _LEARNS or len(known) < _WARM + _ENOUGH:
            return None

        # Leave out the first ones, unless newer ones have replaced them.
        if len(known) != self._current.maxlen:
            known = known[_WARM:]
        known = sorted(known)
        return known[len(known) // 2], known[-1]

    def limit(self, patience: float) -> float:
        """Return the hang limit in seconds: longest interval + patience * max(3 * median, 9)."""
        usual = None if self._opening else self.usual()
        if usual is None:
            slow = self.now_in in (SET_UP, LOADING, ENDING)
            return patience * (_SLOW if slow else _FIRST)
        median, longest = usual
        return longest + patience * max(3 * median, _AT_LEAST)


BEATS = Beats()  # of this process
