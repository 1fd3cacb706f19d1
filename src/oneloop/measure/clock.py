"""Where a step's time goes: waiting for data and its transfer, forward and backward, update, evaluation, saving.

>>> clock = Clock(device)
>>> for batch in clock.over("data", loader):     # the time in which a batch is awaited
...     loss.backward(); clock.mark("compute")   # the time since the last mark was spent on this
...     optimizer.step(); clock.mark("update"); clock.step()
>>> clock.read()                                 # {"share/data": 0.31, …, "speed/step_seconds": 0.012}

On a CPU the host's clock says it all. A GPU works behind the host: there events are recorded at the marks of the last
steps, without a wait, and :meth:`read` asks them; the time that a device idles between two marks counts for the later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import torch

Item = TypeVar("Item")

PHASES = ("data", "transfer", "compute", "update", "evaluate", "save", "other")
"""waiting for data; waiting for its copy to the device; forward and backward (with the reduction of gradients); norm,
clipping, optimizer and averages; evaluation; the copy that a checkpoint waits for; the rest"""

_ON_DEVICE = ("data", "transfer", "compute", "update")
_STEP = "step"
_MANY = 8192
"""marks that are kept before they are summed"""


class Clock:
    """Times phases between two reads; on a GPU it keeps the marks of the last ``events`` steps."""

    def __init__(self, device: torch.device, *, events: int = 8) -> None:
        self._device = device
        self._events: deque[list[tuple[str, torch.Event]]] = deque(maxlen=events)
        self._on_device = device.type == "cuda"
        self._total: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        """Begins anew, from now on."""
        self._spent: dict[str, float] = defaultdict(float)
        self._steps: list[float] = []
        self._marks: list[tuple[str, float]] = []
        """not yet summed: at every step there is time for no more than to write them down"""
        self._events.clear()
        self._last = self._began = self._since = perf_counter()

    def mark(self, phase: str) -> None:
        """The time since the last mark was spent on ``phase``. Host only; about a microsecond (a GPU: three)."""
        self._marks.append((phase, perf_counter()))
        if self._on_device:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            if not self._events:
                self._events.append([])
            self._events[-1].append((phase, event))

    def over(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the time in which each is awaited is spent on ``phase``."""
        for item in items:
            self.mark(phase)
            yield item

    def step(self, phase: str) -> None:
        """A step is done, and its last part was spent on ``phase``."""
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
        """Since the last read: shares of the time, which sum to 1; median and interquartile range of a step's seconds;
        ``seconds`` in all, without evaluation and saving.

        On a GPU: to be called after a wait for the device.
        """
        self._sum()
        spent = dict(self._spent)
        if self._on_device:
            spent |= self._of_device(sum(spent.get(phase, 0.0) for phase in _ON_DEVICE))
        for phase, seconds in spent.items():
            self._total[phase] += seconds
        whole = sum(spent.values()) or 1.0
        figures = {f"share/{phase}": spent.get(phase, 0.0) / whole for phase in PHASES}
        figures["seconds"] = perf_counter() - self._since - spent.get("evaluate", 0.0) - spent.get("save", 0.0)
        if self._steps:
            low, middle, high = _quartiles(self._steps)
            figures["speed/step_seconds"], figures["speed/step_seconds_iqr"] = middle, high - low
        self.restart()
        return figures

    def overall(self) -> dict[str, float]:
        """Shares of the time of all reads together."""
        whole = sum(self._total.values()) or 1.0
        return {f"share/{phase}": self._total.get(phase, 0.0) / whole for phase in PHASES}

    def _of_device(self, seconds: float) -> dict[str, float]:
        """The host's seconds of these phases, divided as the device spent them."""
        spent: dict[str, float] = defaultdict(float)
        for marks in self._events:
            for (_, before), (phase, event) in pairwise(marks):
                if phase in _ON_DEVICE:
                    spent[phase] += before.elapsed_time(event)
        whole = sum(spent.values())
        return {phase: value / whole * seconds for phase, value in spent.items()} if whole else {}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first, the second and the third, between the nearest two values (as numpy.quantile has them)."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)
