"""Advice: which setting would save the most time (data-loading workers, batch size, how often to
evaluate and save)."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

SIGNIFICANT = 0.15  # share of the time from which something is worth a sentence
LONG_ENOUGH = 30.0  # seconds of training from which changing a setting can pay
_SMALLER_TYPES = (
    "send smaller types (pixels as uint8, tokens as int32) and convert them in the model"
)
_FEWER_UPDATES = (
    "a larger batch.size has fewer updates; adamw and sgd are fused, other optimizers may not be"
)


def diagnosis(
    shares: Mapping[str, float],
    *,
    workers: int,
    cores: int,
    steps: int = 0,
    eval_every: int = 0,
    save_every: int = 0,
) -> str:
    """Return the largest part of the time that a setting could spare, or that the model's own work
    fills the time; after a colon, what to change, if ``shares`` cover :data:`LONG_ENOUGH` and a
    change helps in a run of ``steps``.

    ``shares`` are those of a :class:`~oneloop.measure.clock.Clock`, ``workers`` those of this
    process, ``cores`` those that could load data (0: they train). ``eval_every`` and ``save_every``
    are in steps (0: at the end only)."""
    if not any(shares.values()):
        return ""  # nothing was measured yet

    def share(phase: str) -> float:
        return shares.get(f"share/{phase}", 0.0)

    advice = {
        "data": ("the device waits for data", _more_workers(share("data"), workers, cores)),
        "transfer": ("the device waits for the copy of batches", _SMALLER_TYPES),
        "update": ("goes into the optimizer's update", _FEWER_UPDATES),
        "evaluate": (
            "goes into evaluation",
            _rarer("eval.every", eval_every, share("evaluate") / 0.05, steps),
        ),
        "save": (
            "training waits for checkpoints",
            _rarer("save.every", save_every, share("save") / 0.02, steps),
        ),
    }
    largest = max(advice, key=share)
    if share(largest) < SIGNIFICANT:
        compute = share("compute")
        as_it_should = ", as it should" if compute > 0.5 else "; no other part of a step takes long"
        return f"{100 * compute:.0f} % of the time goes into forward and backward{as_it_should}"
    what, change = advice[largest]
    change = f": {change}" if change and shares.get("seconds", LONG_ENOUGH) >= LONG_ENOUGH else ""
    return f"{100 * share(largest):.0f} % of the time {what}{change}"


def _rarer(key: str, every: int, times: float, steps: int) -> str:
    """Raise ``every`` (in steps) by this factor; nothing if that is beyond the end of the run."""
    scale = 10 ** max(0, math.floor(math.log10(max(1.0, every * times))) - 1)
    fewer = int(math.ceil(every * times / scale) * scale)
    return (
        f"raise {key} from {every} steps to {fewer}"
        if every and (not steps or fewer < steps)
        else ""
    )


class Advice:
    """Repeats the advice of :func:`diagnosis` only if it names another phase, at most once per
    ``interval`` seconds."""

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
    """Return advice for this share of time spent waiting for data: more workers, or cheaper
    samples."""
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
