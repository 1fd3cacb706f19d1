"""Find ranks that slow down all others. The ranks of a step wait for each other, so that all show
the same step time; each rank therefore measures what no other rank can delay.

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

LIMIT, TIMES = 1.33, 3  # reported above this factor of the median, this many times in a row
_WINDOW = 1.0  # seconds whose log steps are averaged, so that one slow step does not count


class DeviceTime:
    """Times a rank's device: the forward of ``model`` (inside of DDP's wrapper, so without
    collectives), and a small matrix product (the fastest of four). Not ``alone``: the forward waits
    for other ranks, as under FSDP2 and with SyncBatchNorm, and is not timed."""

    def __init__(self, model: nn.Module, device: torch.device, *, alone: bool = True) -> None:
        self._model, self._device = getattr(model, "module", model), device
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
                stack.callback(
                    self._model.register_forward_pre_hook(self._begin, with_kwargs=True).remove
                )
                stack.callback(self._model.register_forward_hook(self._end).remove)
            stack.enter_context(inside or nullcontext())
            yield

    def _begin(self, _: nn.Module, *inputs: Any) -> None:
        tensors = (value for value in tree_leaves(inputs) if isinstance(value, Tensor))
        self._marks.append([sum(value.numel() for value in tensors), self._now()])

    def _end(self, *_: Any) -> None:
        self._marks[-1].append(self._now())

    def read(self) -> tuple[float, float, float]:
        """Return the seconds of the forwards since the last read, the elements of their inputs, and
        the seconds of the product. On a GPU, wait for it: call it only at log steps."""
        values = torch.ones([128 if self._device.type == "cpu" else 2048] * 2, device=self._device)
        # one product between two times
        times = [self._now() for _ in range(5) if torch.is_tensor(values @ values)]
        product = min(self._seconds(*pair) for pair in pairwise(times))
        marks, self._marks = [mark for mark in self._marks if len(mark) == 3], []
        return (
            sum(self._seconds(*mark[1:]) for mark in marks),
            float(sum(mark[0] for mark in marks)),
            product,
        )

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if self._device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Stragglers:
    """Judges the times of all ranks. A rank is a straggler if its device takes more than 1.33 times
    the median, or if its wait for data makes the step 1.33 times as long, three times in a row (the
    lower median: of two ranks, the faster one). ``names`` are the ranks' hosts."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._since = names, float("-inf")
        # by log and rank: wait, device, seconds per step
        self._seen: list[list[tuple[float, float, float]]] = []
        self._streaks: defaultdict[tuple[int, str], int] = defaultdict(int)

    def judge(
        self, times: Sequence[Sequence[float]], *, step_seconds: float, now: float
    ) -> Iterator[tuple[int, str]]:
        """Add one log step, at the time ``now``: for each rank its wait for data per step in
        seconds, and the values of :meth:`DeviceTime.read`. Yield the ranks that are stragglers
        since this log, with a description.

        Forwards are compared only if all ranks had inputs of the same size; else the products
        are."""
        same = len({elements for _, _, elements, _ in times}) == 1 and times[0][2] > 0
        self._seen.append(
            [
                (wait, forward if same else product, step_seconds)
                for wait, forward, _, product in times
            ]
        )
        if now - self._since < _WINDOW:
            return
        means = [
            [fmean(values) for values in zip(*rank, strict=True)]
            for rank in zip(*self._seen, strict=True)
        ]
        self._seen, self._since = [], now
        wait, device = (median_low(rank[kind] for rank in means) for kind in (0, 1))
        for number, (mine, own, step) in enumerate(means):
            # the step, if this rank waited as long as the others
            without = max(step - max(mine - wait, 0.0), 1e-9)
            data = (
                f"its wait for data makes a step {step / without:.2f}x as long; its disk, or its "
                "worker processes"
            )
            slow = (
                f"its device takes {own / (device or 1.0):.2f}x the median; its clock, "
                "temperature, other processes"
            )
            for kind, ratio, words in (
                ("data", step / without, data),
                ("device", own / (device or 1.0), slow),
            ):
                streak = self._streaks[number, kind] = (self._streaks[number, kind] + 1) * (
                    ratio > LIMIT
                )
                if streak == TIMES:
                    yield (
                        number,
                        f"rank {number} on {self._names[number]} slows down all ranks: {words}",
                    )
