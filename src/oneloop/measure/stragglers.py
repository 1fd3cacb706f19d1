"""Find ranks that slow down all others.

The ranks of a step wait for each other, so that all show the same step time; each rank therefore
measures what no other rank can delay.

>>> own = DeviceTime(model, device)
>>> with own.measuring():                              # at a log step
...     loss = model(batch)
>>> found = stragglers.judge([(wait, *own.read())], step_seconds=0.1, now=time.monotonic())
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from statistics import fmean, median_low
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LIMIT = 1.33  # a rank is reported above this factor of the median …
TIMES = 3  # … this many times in a row
_WINDOW = 1.0  # seconds whose log steps are averaged, so that one slow step does not count


class DeviceTime:
    """Times a rank's device: the forward of a model, and a small matrix product.

    Args:
        model: Its forward is timed inside of DDP's wrapper, so without collectives.
        device: Of the model.
        alone: Whether the forward waits for no other rank; else it is not timed. It waits under
            FSDP2 and with SyncBatchNorm.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, alone: bool = True) -> None:
        self._model = getattr(model, "module", model)
        self._device = device
        # Events of an Apple GPU, which trains alone, are not worth their cost.
        self._on_host = device.type in ("cpu", "mps")
        self._alone = alone and not any(
            isinstance(part, nn.SyncBatchNorm) for part in model.modules()
        )
        # of each forward: the elements of its input, its begin and its end
        self._marks: list[list[Any]] = []

    @contextmanager
    def measuring(self, inside: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Time the forwards in this context; also enter ``inside``."""
        with ExitStack() as stack:
            if self._alone:
                begin = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
                stack.callback(begin.remove)
                end = self._model.register_forward_hook(self._end)
                stack.callback(end.remove)
            stack.enter_context(inside or nullcontext())
            yield

    def _begin(self, _: nn.Module, *inputs: Any) -> None:
        elements = 0
        for value in tree_leaves(inputs):
            if isinstance(value, Tensor):
                elements += value.numel()
        self._marks.append([elements, self._now()])

    def _end(self, *_: Any) -> None:
        self._marks[-1].append(self._now())

    def read(self) -> tuple[float, float, float]:
        """Return the times since the last read. On a GPU, wait for it: call it only at log steps.

        Returns:
            The seconds of the forwards, the elements of their inputs, and the seconds of the
            product (the fastest of four).
        """
        side = 128 if self._device.type == "cpu" else 2048
        values = torch.ones([side, side], device=self._device)
        times = []
        for _ in range(5):
            values @ values
            times.append(self._now())
        product = min(self._seconds(*pair) for pair in pairwise(times))

        # A forward that raised has no end.
        marks = [mark for mark in self._marks if len(mark) == 3]
        self._marks = []
        forwards = sum(self._seconds(begin, end) for _, begin, end in marks)
        elements = sum(mark[0] for mark in marks)
        return forwards, float(elements), product

    def _now(self) -> Any:
        if self._on_host:
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if self._on_host:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


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
        self._since = float("-inf")  # when the current window began
        # by log and rank: wait, device, seconds per step
        self._seen: list[list[tuple[float, float, float]]] = []
        self._streaks: defaultdict[tuple[int, str], int] = defaultdict(int)

    def judge(
        self, times: Sequence[Sequence[float]], *, step_seconds: float, now: float
    ) -> Iterator[tuple[int, str]]:
        """Add one log step; yield (rank, description) of ranks that are stragglers since this one.

        Forwards are compared only if all ranks had inputs of the same size; else the products are.

        Args:
            times: For each rank its wait for data per step, in seconds, and the values of
                :meth:`DeviceTime.read`.
            step_seconds: Seconds per step.
            now: The time of this log step, in seconds.
        """
        same = len({elements for _, _, elements, _ in times}) == 1 and times[0][2] > 0
        ranks = []
        for wait, forward, _, product in times:
            ranks.append((wait, forward if same else product, step_seconds))
        self._seen.append(ranks)
        if now - self._since < _WINDOW:
            return

        # Average over the window, so that one slow step does not count.
        means = []
        for logged in zip(*self._seen, strict=True):
            means.append([fmean(values) for values in zip(*logged, strict=True)])
        self._seen = []
        self._since = now

        wait = median_low(rank[0] for rank in means)
        device = median_low(rank[1] for rank in means) or 1.0
        for number, (mine, own, step) in enumerate(means):
            slow = f"rank {number} on {self._names[number]} slows down all ranks"
            # Compare with the step if this rank waited as long as the others.
            without = max(step - max(mine - wait, 0.0), 1e-9)
            if self._is_new(number, "data", step / without):
                why = f"its wait for data makes a step {step / without:.2f}x as long"
                yield number, f"{slow}: {why}; its disk, or its worker processes"
            if self._is_new(number, "device", own / device):
                why = f"its device takes {own / device:.2f}x the median"
                yield number, f"{slow}: {why}; its clock, temperature, other processes"

    def _is_new(self, number: int, kind: str, ratio: float) -> bool:
        """Count how often in a row the ratio is too large; return whether that is reported now."""
        if ratio > LIMIT:
            self._streaks[number, kind] += 1
        else:
            self._streaks[number, kind] = 0
        return self._streaks[number, kind] == TIMES
