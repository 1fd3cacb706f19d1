"""The micro-batches of one step, loaded ahead by worker processes and copied ahead to the device."""

import math
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from oneloop.basics.launcher import die_with, on_stops
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered
from oneloop.data.seeded_samples import Batches, Place, SeededSamples

Batch = dict[str, Any]


@dataclass
class Group:
    """The micro-batches of one step on this process, and what they weigh together."""

    batches: Iterator[Batch]
    """on the device, the next one on its way while one is used"""
    weights: list[float]
    """weight of each micro-batch, known before the first is used"""
    apart: bool = False
    """whether the total is to be the same bits for every split: the ranks then tell every weight"""
    total: float = math.nan
    """weight of the whole global batch, once the ranks have agreed on it"""
    stop: bool = False
    """whether any rank was told to stop after this step"""

    @property
    def weight(self) -> float:
        """Summed weight of this process's samples."""
        return sum(self.weights)


class CollateWithWeight:
    """Collates samples, and says what they weigh: [(index, sample)] -> (batch, weight).

    ``batch["index"]`` holds the samples' indices; float32 tensors get ``dtype``.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Batch],
        weight: Callable[[Batch], Tensor],
        *,
        sample_weight: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.collate, self.weight, self.sample_weight, self.dtype = collate, weight, sample_weight, dtype

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[Batch, float]:
        indices, values = zip(*samples, strict=True)
        batch = self.completed(self.collate(list(values)), indices)
        if self.sample_weight is not None:
            return batch, self.sample_weight * len(indices)
        return batch, float(self.weight(batch).numpy())

    def completed(self, batch: Batch, indices: Sequence[int]) -> Batch:
        """A collated batch with its samples' indices, and its float32 tensors in ``dtype``; others stay as they are."""
        batch["index"] = torch.tensor(indices)
        if self.dtype is not torch.float32:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.dtype is torch.float32:
                    batch[name] = value.to(self.dtype)
        return batch


class _Places:
    """Endless micro-batches of places for one rank, from a position on."""

    def __init__(self, order: Ordered, layout: BatchLayout, *, rank: int, start: int) -> None:
        self.order, self.layout, self.rank, self.start = order, layout, rank, start

    def __iter__(self) -> Iterator[list[Place]]:
        each = self.layout.each
        mine = each * np.array([self.layout.leaf(self.rank, micro) for micro in range(self.layout.accumulate)])
        share = (mine[:, None] + np.arange(each)).reshape(-1)  # of a step, from its first sample on
        ahead = max(1, 4096 // len(share))  # steps computed at once: numpy's calls cost more than their work
        start = self.start
        while True:
            steps = start + self.layout.size * np.arange(ahead)
            positions = (steps[:, None] + share[None, :]).reshape(-1, each)
            epochs, indices = self.order.at(positions.astype(np.int64))
            for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True):
                yield list(zip(epoch, index, strict=True))
            start += self.layout.size * ahead


def workers_here(asked: int | str, *, device: torch.device, local_ranks: int) -> int:
    """Worker processes for each training process: as asked; ``auto`` is 0 on a CPU, whose cores train."""
    if asked != "auto":
        return int(asked)
    if device.type == "cpu":
        return 0
    return max(1, min(8, len(os.sched_getaffinity(0)) // local_ranks - 1))


def loader(
    samples: SeededSamples,
    collate: CollateWithWeight,
    batches: Iterable[Sequence[Place]],
    *,
    workers: int,
    device: torch.device,
    ahead: int = 2,
    pinned: bool = True,
) -> Iterable[tuple[Batch, float]]:
    """Batches and their weights from lists of places; draws nothing from the global generator."""
    dataset = Batches(samples, collate)
    if not workers and device.type != "cuda":  # a DataLoader would only keep a profiler's record of each (8 us)
        return map(dataset.__getitem__, batches)
    how: dict[str, Any] = {"num_workers": workers, "persistent_workers": False, "generator": torch.Generator()}
    how |= {"prefetch_factor": max(2, math.ceil(ahead / workers)) if workers else None}
    how |= {"pin_memory": pinned and device.type == "cuda", "worker_init_fn": partial(_begin_worker, os.getpid())}
    loading = DataLoader(dataset, batch_size=None, sampler=batches, collate_fn=_as_it_is, **how)
    return _of_workers(loading) if workers else loading


def end_workers(error: BaseException | None) -> None:
    """Ends the worker processes that an exception of theirs would keep: its traceback, or that of one which it was
    raised from, holds what reads from them. (While it does, torch raises when it hears of their end, wherever.)"""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.data.dataloader.__file__:
                frame.clear()
        error = error.__cause__ or error.__context__


def _of_workers(loading: Iterable[tuple[Batch, float]]) -> Iterator[tuple[Batch, float]]:
    """What worker processes load; one that has gone is called by its name, however that is seen."""
    try:
        yield from loading
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(f"a DataLoader worker exited without an error message ({error})") from error


def _begin_worker(parent: int, number: int) -> None:
    """A process that loads data lives as long as the one that trains, which decides what signals mean."""
    die_with(parent)
    on_stops(signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch


def groups(
    dataset: Any,
    collate: CollateWithWeight,
    order: Ordered,
    layout: BatchLayout,
    *,
    rank: int,
    seed: int,
    start: int,
    device: torch.device,
    workers: int = 0,
    pinned: bool = True,
) -> Iterator[Group]:
    """Endless groups for ``rank``, from position ``start`` on; use up one group's batches before the next's.

    Worker processes load two groups ahead; the next micro-batch is copied to the device while one is used.
    """
    places = _Places(order, layout, rank=rank, start=start)
    keyed, ahead = SeededSamples(dataset, seed=seed, name="train"), 2 * layout.accumulate
    batches = iter(loader(keyed, collate, places, workers=workers, device=device, ahead=ahead, pinned=pinned))
    loaded: deque[Batch] = deque()
    weights: deque[list[float]] = deque()

    def load() -> None:
        group = list(islice(batches, layout.accumulate))
        loaded.extend(batch for batch, _ in group)
        weights.append([weight for _, weight in group])

    def stream() -> Iterator[Batch]:
        while True:
            if not loaded:
                load()
            yield loaded.popleft()

    moved = transferred(stream(), device, pinned=pinned)
    ahead = 2 if device.type == "cuda" else 1  # so that what is copied ahead is there, and is not waited for
    try:
        while True:
            while len(weights) < ahead:
                load()
            yield Group(islice(moved, layout.accumulate), weights.popleft(), apart=bool(layout.grain))
    finally:
        batches = iter(())  # ends the workers, whoever still holds a group


def transferred(batches: Iterator[Batch], device: torch.device, *, pinned: bool = True) -> Iterator[Batch]:
    """The batches on ``device``; on CUDA each is copied on a stream of its own while the one before is used.

    Args:
        batches: in host memory.
        device: where they are to be.
        pinned: they are in pinned memory; else CUDA copies them while the host waits.
    """
    if device.type != "cuda" or not pinned:
        yield from batches if device.type == "cpu" else (_to(batch, device) for batch in batches)
        return
    copies = torch.cuda.Stream(device)
    coming: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(copies):
            following = _to(batch, device)
        if coming is not None:
            yield coming
        torch.cuda.current_stream(device).wait_stream(copies)
        for value in following.values():
            if torch.is_tensor(value):
                value.record_stream(torch.cuda.current_stream(device))  # its memory is not reused too early
        coming = following
    if coming is not None:
        yield coming


def _to(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}
