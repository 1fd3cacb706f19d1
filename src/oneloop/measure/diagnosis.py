"""What the shares of the time mean, in a sentence that says what to change.

>>> Advice(workers=2, cores=8)(lambda: {"share/data": 0.31, "share/compute": 0.6})
['31 % of the time the device waits for data: raise machine.workers from 2 to 4']
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

SIGNIFICANT = 0.15
"""share of the time from which something is worth a sentence"""


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
        as_it_should = ", as it should" if compute > 0.5 else "; no other part of a step stands out"
        return f"{100 * compute:.0f} % of the time goes into forward and backward{as_it_should}"
    percent = f"{100 * largest:.0f} % of the time"
    if largest == data:
        return f"{percent} the device waits for data: {_more_workers(data, workers, cores)}"
    if largest == transfer:
        return (
            f"{percent} the device waits for batches on their way to it: send smaller types (pixels as uint8, tokens as"
            " int32) and convert them in the model"
        )
    if largest == evaluate:
        every = f" from {eval_every} steps to {_rounder(eval_every * largest / 0.05)}" if eval_every else ""
        return f"{percent} goes into evaluation: raise eval.every{every}, or eval.micro"
    if largest == save:
        every = f" from {save_every} steps to {_rounder(save_every * largest / 0.02)}" if save_every else ""
        return f"{percent} training waits for checkpoints: raise save.every{every}"
    return (
        f"{percent} goes into the optimizer's update: a larger batch.size has fewer updates; adamw and sgd are"
        " fused, other optimizers may not be"
    )


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
        return (
            f"raise machine.workers from {workers} to {cores}, and make the samples cheaper to load; {needed} would be"
            " needed"
        )
    return "all cores load already; store the samples in a form that is cheaper to load"


def _rounder(number: float) -> int:
    scale = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return int(math.ceil(number / scale) * scale)
