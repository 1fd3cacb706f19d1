"""Advice: which setting would save the most time.

These are data-loading workers, batch size, and how often to evaluate and save."""

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
    """Return the largest part of the time that a setting could spare, and what to change.

    If there is no such part, the model's own work fills the time. A change follows after a colon,
    if ``shares`` cover :data:`LONG_ENOUGH` and the change helps in a run of ``steps``.

    Args:
        shares: Those of a :class:`~oneloop.measure.clock.Clock`.
        workers: Data-loading workers of this process.
        cores: Cores that could load data (0: they train).
        steps: Steps of the run (0: unknown).
        eval_every: Steps between evaluations (0: at the end only).
        save_every: Steps between checkpoints (0: at the end only).
    """
    if not any(shares.values()):
        return ""  # nothing was measured yet

    def share(phase: str) -> float:
        return shares.get(f"share/{phase}", 0.0)

    # Of each phase: where the time goes, and what to change.
    fewer_evaluations = _rarer("eval.every", eval_every, share("evaluate") / 0.05, steps)
    fewer_saves = _rarer("save.every", save_every, share("save") / 0.02, steps)
    advice = {
        "data": ("the device waits for data", _more_workers(share("data"), workers, cores)),
        "transfer": ("the device waits for the copy of batches", _SMALLER_TYPES),
        "update": ("goes into the optimizer's update", _FEWER_UPDATES),
        "evaluate": ("goes into evaluation", fewer_evaluations),
        "save": ("training waits for checkpoints", fewer_saves),
    }
    largest = max(advice, key=share)
    if share(largest) < SIGNIFICANT:
        compute = 100 * share("compute")
        if compute > 50:
            return f"{compute:.0f} % of the time goes into forward and backward, as it should"
        return (
            f"{compute:.0f} % of the time goes into forward and backward; no other part of a step "
            "takes long"
        )
    what, change = advice[largest]
    sentence = f"{100 * share(largest):.0f} % of the time {what}"
    if change and shares.get("seconds", LONG_ENOUGH) >= LONG_ENOUGH:
        sentence += f": {change}"
    return sentence


def _rarer(key: str, every: int, times: float, steps: int) -> str:
    """Return advice to raise ``every`` (in steps) by a factor; empty beyond the end of the run."""
    wanted = every * times
    scale = 10 ** max(0, math.floor(math.log10(max(1.0, wanted))) - 1)  # two digits
    fewer = int(math.ceil(wanted / scale) * scale)
    if not every or (steps and fewer >= steps):
        return ""
    return f"raise {key} from {every} steps to {fewer}"


class Advice:
    """Repeats the advice of :func:`diagnosis` only if it names another phase.

    Args:
        interval: Seconds between two calls of it, at least.
        about: Its other arguments.
    """

    def __init__(self, *, interval: float = 1.0, **about: Any) -> None:
        self._interval = interval
        self._about = about
        self._last_call = float("-inf")
        self._last_kind = ""

    def sentence(self, shares: Mapping[str, float]) -> str:
        """Return the advice for these shares."""
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
    """Return advice for this share of time spent waiting: more workers, or cheaper samples."""
    if not cores:
        return "make the samples cheaper to load"
    times = 1.0 / (1.0 - min(share, 0.95))  # factor of the load rate that removes the wait
    if workers:
        needed = math.ceil(workers * times) + 1
    else:
        needed = max(1, math.ceil(share * times))
    if workers < needed <= cores:
        return f"raise machine.workers from {workers} to {needed}"
    if workers < cores:
        return (
            f"raise machine.workers from {workers} to {cores}, and make the samples cheaper to "
            f"load; {needed} would be needed"
        )
    return "all cores load already; store the samples in a form that is cheaper to load"
