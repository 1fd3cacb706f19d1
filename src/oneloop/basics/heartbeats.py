"""Signs of life: what this process is at, and when it last got on, for whoever watches it.

>>> with BEATS.phase("evaluation"):
...     for batch in batches:
...         BEATS.beat()
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

SET_UP, TRAINING, EVALUATION, SAVING, ENDING = "set-up", "training", "evaluation", "saving", "ending"
EPOCH, METRICS = "training (new epoch)", "evaluation (metrics)"

_FIRST = {SET_UP: 1800.0, ENDING: 1800.0, **dict.fromkeys((TRAINING, EPOCH, EVALUATION, METRICS, SAVING), 600.0)}
"""seconds without a sign of life, as long as nothing is known of what is usual (a first step compiles)"""
_LEARNS = (TRAINING, EPOCH, EVALUATION)  # phases that consist of similar steps
_WARM = 2  # steps of a phase that tell nothing of those that follow
_ENOUGH = 3
_AT_LEAST = 9.0  # seconds that are waited beyond what was to be expected


class Beats:
    """The last sign of life of a process, and how long it usually takes from one to the next."""

    def __init__(self) -> None:
        self.now_in = SET_UP  # the phase
        self.count = 0  # signs of life so far
        self.unit = ""  # number and name of the FSDP2 unit that ran last in this step
        self.last = monotonic()
        self.changed: Callable[[], None] = lambda: None  # called at the beginning of every phase
        self._known: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))
        self._seen: defaultdict[str, int] = defaultdict(int)
        self._current = self._known[SET_UP]
        self._opening = False
        """whether this is the first batch of an evaluation: a data set may do there what it does once per evaluation"""

    def beat(self) -> None:
        """Something was done. Half a microsecond."""
        now = monotonic()
        if self._opening:
            self._opening = False
        else:
            self._current.append(now - self.last)
        self.last = now
        self.count += 1

    def enter(self, phase: str) -> None:
        """From now on it is at this."""
        self.now_in, self._current, self._opening = phase, self._known[phase], phase == EVALUATION
        self.last = monotonic()
        self.count += 1
        self.changed()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """It is at this in here."""
        before = self.now_in
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def usual(self) -> tuple[float, float] | None:
        """Median and longest of the last times from one sign of life to the next, in this phase; None: not known."""
        known = list(self._current)
        if self.now_in == TRAINING and len(known) < _WARM + _ENOUGH:
            known = [*self._known[EPOCH], *known]
        if self.now_in not in _LEARNS or len(known) < _WARM + _ENOUGH:
            return None
        known = sorted(known if len(known) == self._current.maxlen else known[_WARM:])
        return known[len(known) // 2], known[-1]

    def limit(self, patience: float) -> float:
        """Seconds after which a process that gives no sign of life hangs: the longest that was usual and, times
        ``patience``, the larger of three medians and nine seconds."""
        usual = None if self._opening else self.usual()
        if usual is None:
            return patience * _FIRST[self.now_in]
        return usual[1] + patience * max(3 * usual[0], _AT_LEAST)


BEATS = Beats()  # of this process
