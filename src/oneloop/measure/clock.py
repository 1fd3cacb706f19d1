"""Where the time of the steps goes, and what to change about it."""

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
clipping, optimizer and averages; evaluation; the copy that a checkpoint waits for; the rest"""

_ON_DEVICE = ("data", "transfer", "compute", "update")
_STEP = "step"
_MANY = 8192  # marks that are kept before they are summed


class Clock:
    """Times phases between two reads; on a GPU it keeps the marks of the last 8 steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[list[tuple[str, torch.Event]]] = deque(maxlen=8)
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
        metrics = {f"share/{phase}": spent.get(phase, 0.0) / whole for phase in PHASES}
        metrics["seconds"] = perf_counter() - self._since - spent.get("evaluate", 0.0) - spent.get("save", 0.0)
        if self._steps:
            low, middle, high = _quartiles(self._steps)
            metrics["speed/step_seconds"], metrics["speed/step_seconds_iqr"] = middle, high - low
        self.restart()
        return metrics

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


SIGNIFICANT = 0.15  # share of the time from which something is worth a sentence


def diagnosis(
    shares: Mapping[str, float], *, workers: int, cores: int, eval_every: int = 0, save_every: int = 0
) -> str:
    """Return the largest part of the time that a setting could spare, and which; or that the model's own work fills it.

    ``shares`` come from :meth:`oneloop.measure.clock.Clock.read`. ``workers`` and ``cores`` are those for this process.
    ``eval_every`` and ``save_every`` are in steps (0: at the end only).
    """
    if not any(shares.values()):
        return ""  # nothing was measured yet
    data, update = shares.get("share/data", 0.0), shares.get("share/update", 0.0)
    evaluate, save = shares.get("share/evaluate", 0.0), shares.get("share/save", 0.0)
    transfer = shares.get("share/transfer", 0.0)
    largest = max(data, transfer, update, evaluate, save)
    if largest < SIGNIFICANT:
        compute = shares.get("share/compute", 0.0)
        as_it_should = ", as it should" if compute > 0.5 else "; no other part of a step takes long"
        return f"{100 * compute:.0f} % of the time goes into forward and backward{as_it_should}"
    percent = f"{100 * largest:.0f} % of the time"
    if largest == data:
        return f"{percent} the device waits for data: {_more_workers(data, workers, cores)}"
    if largest == transfer:
        advice = "send smaller types (pixels as uint8, tokens as int32) and convert them in the model"
        return f"{percent} the device waits for batches on their way to it: {advice}"
    if largest == evaluate:
        every = f" from {eval_every} steps to {_rounder(eval_every * largest / 0.05)}" if eval_every else ""
        return f"{percent} goes into evaluation: raise eval.every{every}, or eval.micro"
    if largest == save:
        every = f" from {save_every} steps to {_rounder(save_every * largest / 0.02)}" if save_every else ""
        return f"{percent} training waits for checkpoints: raise save.every{every}"
    advice = "a larger batch.size has fewer updates; adamw and sgd are fused, other optimizers may not be"
    return f"{percent} goes into the optimizer's update: {advice}"


class Advice:
    """Repeat :func:`diagnosis` only if it names another part of the time, at most once in ``interval`` seconds.

    The first ``after`` calls are left out: the first steps are slower than the rest.
    """

    def __init__(self, *, after: int = 0, interval: float = 1.0, **about: Any) -> None:
        self._after, self._interval, self._about = after, interval, about
        self._looked = float("-inf")
        self._said = ""

    def sentence(self, shares: Mapping[str, float]) -> str:
        return diagnosis(shares, **self._about)

    def __call__(self, shares: Callable[[], Mapping[str, float]]) -> list[str]:
        self._after -= 1
        now = time.monotonic()
        if self._after >= 0 or now - self._looked < self._interval:
            return []
        self._looked = now
        sentence = self.sentence(shares())
        kind = sentence.partition("%")[2].partition(":")[0]
        if kind == self._said:
            return []
        self._said = kind
        return [sentence]


def _more_workers(share: float, workers: int, cores: int) -> str:
    """What to do about waiting for data for this share of the time: so many more workers, or cheaper samples."""
    times = 1.0 / (1.0 - min(share, 0.95))  # as much loading would fill the time without a wait
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
