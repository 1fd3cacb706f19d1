"""Measure where the time of the steps goes."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

Item = TypeVar("Item")

PHASES = ("data", "transfer", "compute", "update", "evaluate", "save", "other")
"""waiting for data; waiting for its copy to the device; forward and backward (with the reduction of
gradients); norm, clipping, optimizer and EMA weights; evaluation; the copy before a checkpoint; the
rest"""

_ON_DEVICE = ("data", "transfer", "compute", "update")
_STEPS = 8  # whose events on a GPU are kept


class Clock:
    """Times the phases between two reads; on a GPU, by the events of the last 8 steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Drop all marks; measure from now on."""
        self._spent: dict[str, float] = defaultdict(float)  # seconds by phase
        self._steps: list[float] = []  # seconds of each step
        # of each step: phases and their events
        self._events: deque[list[tuple[str, torch.Event]]] = deque([[]], maxlen=_STEPS)
        self._last = perf_counter()  # the last mark
        self._began = self._last  # the current step

    def mark(self, phase: str) -> None:
        """Attribute the time since the last mark to ``phase``; no host sync.

        Costs about 1 us (with a GPU, 3 us)."""
        now = perf_counter()
        self._spent[phase] += now - self._last
        self._last = now
        if self._on_device:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._events[-1].append((phase, event))

    def over(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; attribute the time spent waiting for each item to ``phase``."""
        for item in items:
            self.mark(phase)
            yield item

    def lap(self, phase: str) -> None:
        """End a step; attribute the time since the last mark to ``phase``."""
        self.mark(phase)
        self._steps.append(self._last - self._began)
        self._began = self._last
        if self._on_device:
            self._events.append(self._events[-1][-1:])

    def read(self) -> dict[str, float]:
        """Return metrics since the last read, and restart. On a GPU, call it after a device sync.

        These are shares of the time, which sum to 1, the median and interquartile range of the
        seconds per step, and the total ``seconds`` without evaluation and saving."""
        self.mark("other")
        spent = dict.fromkeys(PHASES, 0.0) | self._spent
        seconds = sum(spent.values())

        # On a GPU, the host only queues the work of these phases: divide its seconds in proportion
        # to the device's own times.
        on_device: dict[str, float] = defaultdict(float)
        for marks in self._events:
            for (_, before), (phase, event) in pairwise(marks):
                if phase in _ON_DEVICE:
                    on_device[phase] += before.elapsed_time(event)
        total = sum(on_device.values())
        if total:
            queued = sum(spent[phase] for phase in _ON_DEVICE)
            spent |= {phase: time / total * queued for phase, time in on_device.items()}

        metrics = {f"share/{phase}": value / seconds for phase, value in spent.items()}
        metrics["seconds"] = seconds - spent["evaluate"] - spent["save"]
        if self._steps:
            low, middle, high = np.quantile(self._steps, [0.25, 0.5, 0.75]).tolist()
            metrics["speed/step_seconds"] = middle
            metrics["speed/step_seconds_iqr"] = high - low
        self.restart()
        return metrics
