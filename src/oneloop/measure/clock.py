"""Measure where the time of the steps goes, and recommend settings."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

PHASES = ("data", "transfer", "compute", "update", "evaluate", "save", "other")
"""waiting for data; waiting for its copy to the device; forward and backward (with the reduction of gradients); norm,
clipping, optimizer and EMA weights; evaluation; the copy before a checkpoint; the rest"""

_ON_DEVICE = ("data", "transfer", "compute", "update")
_STEP = "step"
_MANY = 8192  # marks to keep before they are summed


class Clock:
    """Times the phases between two reads; on a GPU, by the events of the last 8 steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[list[tuple[str, torch.Event]]] = deque(maxlen=8)
        self._on_device = device.type == "cuda"
        self._total: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        """Drop all marks; measure from now on."""
        self._spent: dict[str, float] = defaultdict(float)
        self._steps: list[float] = []
        self._marks: list[tuple[str, float]] = []
        """(phase, time) not yet summed, which keeps the cost per step low"""
        self._events.clear()
        self._last = self._began = self._since = perf_counter()

    def mark(self, phase: str) -> None:
        """Attribute the time since the last mark to ``phase``. No host sync; costs about 1 us (with a GPU, 3 us)."""
        self._marks.append((phase, perf_counter()))
        if self._on_device:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            if not self._events:
                self._events.append([])
            self._events[-1].append((phase, event))

    def over(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; attribute the time spent waiting for each item to ``phase``."""
        for item in items:
            self.mark(phase)
            yield item

    def step(self, phase: str) -> None:
        """End a step; attribute the time since the last mark to ``phase``."""
        self.mark(phase)
        self._marks.append((_STEP, 0.0))
        if len(self._marks) > _MANY:
            self._sum()
        if self._on_device:
            self._events.append(self._events[-1][-1:] if self._events else [])

    def _sum(self) -> None:
        for phase, now in self._marks:
            if phase is _STEP:
                self._steps.append(self._last - self._began)
                self._began = self._last
            else:
                self._spent[phase] += now - self._last
                self._last = now
        self._marks = []

    def read(self) -> dict[str, float]:
        """Return metrics since the last read, and restart. On a GPU, call it after a device sync.

        These are shares of the time, which sum to 1, the median and interquartile range of the seconds per step, and
        the total ``seconds`` without evaluation and saving.
        """
        self._sum()
        spent = dict(self._spent)
        if self._on_device:
            spent |= self._of_device(sum(spent.get(phase, 0.0) for phase in _ON_DEVICE))
        for phase, seconds in spent.items():
            self._total[phase] += seconds
        whole = sum(spent.values()) or 1.0
        metrics = {f"share/{phase}": spent.get(phase, 0.0) / whole for phase in PHASES}
        metrics["seconds"] = perf_counter() - self._since - spent.get("evaluate", 0.0) - spent.get("save", 0.0)
        if self._steps:
            low, middle, high = _quartiles(self._steps)
            metrics["speed/step_seconds"], metrics["speed/step_seconds_iqr"] = middle, high - low
        self.restart()
        return metrics

    def overall(self) -> dict[str, float]:
        """Return the shares of the time over all reads so far, and its ``seconds``."""
        seconds = sum(self._total.values())
        return {f"share/{p}": self._total.get(p, 0.0) / (seconds or 1.0) for p in PHASES} | {"seconds": seconds}

    def _of_device(self, seconds: float) -> dict[str, float]:
        """Divide the host's seconds for the device phases in proportion to the device's own times."""
        spent: dict[str, float] = defaultdict(float)
        for marks in self._events:
            for (_, before), (phase, event) in pairwise(marks):
                if phase in _ON_DEVICE:
                    spent[phase] += before.elapsed_time(event)
        whole = sum(spent.values())
        return {phase: value / whole * seconds for phase, value in spent.items()} if whole else {}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the three quartiles with linear interpolation, as numpy.quantile does."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (position - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)


SIGNIFICANT = 0.15  # share of the time from which something is worth a sentence
LONG_ENOUGH = 30.0  # seconds of training from which changing a setting can pay


def diagnosis(
    shares: Mapping[str, float], *, workers: int, cores: int, steps: int = 0, eval_every: int = 0, save_every: int = 0
) -> str:
    """Return the largest part of the time that a setting could spare, or that the model's own work fills the time;
    after a colon, what to change, if ``shares`` cover :data:`LONG_ENOUGH` and a change helps in a run of ``steps``.

    ``shares`` come from :meth:`Clock.read` or :meth:`Clock.overall`. ``workers`` are those of this process, ``cores``
    those that could load data (0: they train). ``eval_every`` and ``save_every`` are in steps (0: at the end only).
    """
    if not any(shares.values()):
        return ""  # nothing was measured yet
    advice = {
        "data": ("the device waits for data", _more_workers(shares.get("share/data", 0.0), workers, cores)),
        "transfer": (
            "the device waits for the copy of batches",
            "send smaller types (pixels as uint8, tokens as int32) and convert them in the model",
        ),
        "update": (
            "goes into the optimizer's update",
            "a larger batch.size has fewer updates; adamw and sgd are fused, other optimizers may not be",
        ),
        "evaluate": (
            "goes into evaluation",
            _rarer("eval.every", eval_every, shares.get("share/evaluate", 0.0) / 0.05, steps),
        ),
        "save": (
            "training waits for checkpoints",
            _rarer("save.every", save_every, shares.get("share/save", 0.0) / 0.02, steps),
        ),
    }
    largest = max(advice, key=lambda phase: shares.get(f"share/{phase}", 0.0))
    share = shares.get(f"share/{largest}", 0.0)
    if share < SIGNIFICANT:
        compute = shares.get("share/compute", 0.0)
        as_it_should = ", as it should" if compute > 0.5 else "; no other part of a step takes long"
        return f"{100 * compute:.0f} % of the time goes into forward and backward{as_it_should}"
    what, change = advice[largest]
    change = f": {change}" if change and shares.get("seconds", LONG_ENOUGH) >= LONG_ENOUGH else ""
    return f"{100 * share:.0f} % of the time {what}{change}"


def _rarer(key: str, every: int, times: float, steps: int) -> str:
    """Raise ``every`` (in steps) by this factor; nothing if that is beyond the end of the run."""
    fewer = _rounder(every * times)
    return f"raise {key} from {every} steps to {fewer}" if every and (not steps or fewer < steps) else ""


class Advice:
    """Repeats the advice of :func:`diagnosis` only if it names another phase, at most once per ``interval`` seconds."""

    def __init__(self, *, interval: float = 1.0, **about: Any) -> None:
        self._interval, self._about = interval, about
        self._last_call = float("-inf")
        self._last_kind = ""

    def sentence(self, shares: Mapping[str, float]) -> str:
        return diagnosis(shares, **self._about)

    def __call__(self, shares: Callable[[], Mapping[str, float]]) -> list[str]:
        now = time.monotonic()
        if now - self._last_call < self._interval:
            return []
        self._last_call = now
        sentence = self.sentence(shares())
        kind, _, change = sentence.partition("%")[2].partition(": ")
        if kind == self._last_kind or not change:
            return []
        self._last_kind = kind
        return [sentence]


def _more_workers(share: float, workers: int, cores: int) -> str:
    """Return advice for this share of time spent waiting for data: more workers, or cheaper samples."""
    if not cores:
        return "make the samples cheaper to load"
    times = 1.0 / (1.0 - min(share, 0.95))  # factor of the load rate that removes the wait
    needed = math.ceil(workers * times) + 1 if workers else max(1, math.ceil(share * times))
    if workers < needed <= cores:
        return f"raise machine.workers from {workers} to {needed}"
    if workers < cores:
        more = f"make the samples cheaper to load; {needed} would be needed"
        return f"raise machine.workers from {workers} to {cores}, and {more}"
    return "all cores load already; store the samples in a form that is cheaper to load"


def _rounder(number: float) -> int:
    scale = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return int(math.ceil(number / scale) * scale)
