"""Measure where the time of the steps goes."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import torch

Item = TypeVar("Item")

PHASES = ("data", "transfer", "compute", "update", "evaluate", "save", "other")
"""waiting for data; waiting for its copy to the device; forward and backward (with the reduction of
gradients); norm, clipping, optimizer and EMA weights; evaluation; the copy before a checkpoint; the
rest"""

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
        # (phase, time) not yet summed, which keeps the cost per step low
        self._marks: list[tuple[str, float]] = []
        self._events.clear()
        now = perf_counter()
        self._last = now  # the last mark
        self._began = now  # the current step
        self._since = now

    def mark(self, phase: str) -> None:
        """Attribute the time since the last mark to ``phase``; no host sync.

        Costs about 1 us (with a GPU, 3 us)."""
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

        These are shares of the time, which sum to 1, the median and interquartile range of the
        seconds per step, and the total ``seconds`` without evaluation and saving."""
        self._sum()
        spent = dict(self._spent)
        if self._on_device:  # the host only queues this work
            spent |= self._of_device(sum(spent.get(phase, 0.0) for phase in _ON_DEVICE))
        for phase, seconds in spent.items():
            self._total[phase] += seconds

        whole = sum(spent.values()) or 1.0
        metrics = {f"share/{phase}": spent.get(phase, 0.0) / whole for phase in PHASES}
        seconds = perf_counter() - self._since
        metrics["seconds"] = seconds - spent.get("evaluate", 0.0) - spent.get("save", 0.0)
        if self._steps:
            low, middle, high = _quartiles(self._steps)
            metrics["speed/step_seconds"] = middle
            metrics["speed/step_seconds_iqr"] = high - low
        self.restart()
        return metrics

    def spent(self) -> dict[str, float]:
        """Return the seconds of each phase over all reads so far."""
        return {phase: self._total.get(phase, 0.0) for phase in PHASES}

    def overall(self) -> dict[str, float]:
        """Return the shares of the time over all reads so far, and its ``seconds``."""
        seconds = sum(self._total.values())
        shares = {}
        for phase, value in self.spent().items():
            shares[f"share/{phase}"] = value / (seconds or 1.0)
        return {**shares, "seconds": seconds}

    def _of_device(self, seconds: float) -> dict[str, float]:
        """Divide the host's seconds of these phases in proportion to the device's own times."""
        spent: dict[str, float] = defaultdict(float)
        for marks in self._events:
            for (_, before), (phase, event) in pairwise(marks):
                if phase in _ON_DEVICE:
                    spent[phase] += before.elapsed_time(event)
        whole = sum(spent.values())
        if not whole:
            return {}
        return {phase: value / whole * seconds for phase, value in spent.items()}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the three quartiles with linear interpolation, as numpy.quantile does."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (position - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)
