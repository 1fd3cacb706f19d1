"""Find ranks that slow down all others.

The ranks of a step wait for each other, so that all show the same step time; each rank therefore
measures what no other rank can delay: its wait for data, and a small matrix product.

>>> times = gathered((wait, product_seconds(device)))  # of each rank, at a log step
>>> slow = stragglers.judge(times, step_seconds=0.1, now=time.monotonic())
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_low
from time import perf_counter

import torch

LIMIT = 1.33  # a rank is reported above this factor of the median …
TIMES = 3  # … this many times in a row
_INTERVAL = 1.0  # seconds between two times, at least


def product_seconds(device: torch.device) -> float:
    """Return the seconds of a small matrix product on a device, the fastest of five.

    It waits for the device: call it only at log steps.
    """
    side = 128 if device.type == "cpu" else 2048
    values = torch.ones([side, side], device=device)
    seconds = []
    for _ in range(5):
        began = perf_counter()
        values @ values
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(perf_counter() - began)
    return min(seconds)


class Stragglers:
    """Judges the times of all ranks.

    A rank is a straggler if its device takes more than 1.33 times the median, or if its wait for
    data makes the step 1.33 times as long, three times in a row. (The median is the lower one: of
    two ranks, the faster one.)

    Args:
        names: Hosts of the ranks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._last = float("-inf")  # when the ranks were last judged
        self._streaks: Counter[tuple[int, str]] = Counter()

    def judge(
        self, times: Sequence[Sequence[float]], *, step_seconds: float, now: float
    ) -> Iterator[str]:
        """Judge a log step; yield a sentence on each rank that is a straggler since this one.

        Args:
            times: For each rank its wait for data per step, in seconds, and
                :func:`product_seconds`.
            step_seconds: Seconds per step.
            now: The time of this log step, in seconds.
        """
        if now - self._last < _INTERVAL:
            return
        self._last = now
        usual_wait, usual_product = map(median_low, zip(*times, strict=True))
        for rank, (wait, product) in enumerate(times):
            # Compare with the step if this rank waited as long as the others.
            without = max(step_seconds - max(wait - usual_wait, 0.0), 1e-9)
            longer = step_seconds / without
            data = (
                f"its wait for data makes a step {longer:.2f}x as long; its disk, or its worker "
                "processes"
            )
            slower = product / usual_product
            device = (
                f"its device takes {slower:.2f}x the median; its clock, temperature, other "
                "processes"
            )

            # Count how often in a row a ratio is too large.
            for ratio, cause, why in ((longer, "data", data), (slower, "device", device)):
                streak = self._streaks[rank, cause] + 1 if ratio > LIMIT else 0
                self._streaks[rank, cause] = streak
                if streak == TIMES:
                    yield f"rank {rank} on {self._names[rank]} slows down all ranks: {why}"
