"""The micro-batches of a step: loaded by worker processes and copied to the device in advance."""

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
from torch.utils.data import DataLoader, TensorDataset

from oneloop.basics.launcher import die_with, on_stops
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered
from oneloop.data.seeded_samples import Batches, Place, SeededSamples

Batch = dict[str, Any]


@dataclass
class Group:
    """The micro-batches of one step on this process, and their weight (the divisor of the summed
    loss)."""

    batches: Iterator[Batch]  # on the device; the next one is copied while the current one is used
    weights: list[float]  # weight of each micro-batch, known before the first is used
    apart: bool = False
    """whether the total must be bit-identical on every layout; the ranks then exchange every single
    weight"""
    total: float = math.nan  # weight of the global batch, after the all-reduce
    stop: bool = False  # whether any rank was requested to stop after this step
    save: bool = False  # whether the time for a save after this step has come, by rank 0's clock

    @property
    def weight(self) -> float:
        """Return the summed weight of this process's samples."""
        return sum(self.weights)


class CollateWithWeight:
    """A collate function that also returns the weight: [(index, sample)] -> (batch, weight).

    ``batch["index"]`` holds the indices of the samples. float32 tensors are converted to
    ``dtype``."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Batch],
        weight: Callable[[Batch], Tensor],
        *,
        sample_weight: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.collate, self.weight, self.sample_weight, self.dtype = (
            collate,
            weight,
            sample_weight,
            dtype,
        )

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[Batch, float]:
        indices, values = zip(*samples, strict=True)
        batch = self.completed(self.collate(list(values)), indices)
        if self.sample_weight is not None:
            return batch, self.sample_weight * len(indices)
        return batch, float(self.weight(batch).numpy())

    def completed(self, batch: Batch, indices: Sequence[int]) -> Batch:
        """Add the sample indices to a collated batch and convert its float32 tensors to ``dtype``;
        return the batch."""
        batch["index"] = torch.tensor(indices)
        if self.dtype is not torch.float32:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.dtype is torch.float32:
                    batch[name] = value.to(self.dtype)
        return batch


class _RankBatches:
    """The endless micro-batches of (epoch, index) pairs of one rank, from position ``start`` on."""

    def __init__(self, order: Ordered, layout: BatchLayout, *, rank: int, start: int) -> None:
        self.order, self.layout, self.rank, self.start = order, layout, rank, start

    def __iter__(self) -> Iterator[list[Place]]:
        each = self.layout.each
        starts = each * np.array(
            [self.layout.leaf(self.rank, micro) for micro in range(self.layout.accumulate)]
        )
        # offsets of this rank's samples within a step
        share = (starts[:, None] + np.arange(each)).reshape(-1)
        # steps per computation: the overhead of numpy's calls dominates
        ahead = max(1, 4096 // len(share))
        start = self.start
        while True:
            steps = start + self.layout.size * np.arange(ahead)
            positions = (steps[:, None] + share[None, :]).reshape(-1, each)
            epochs, indices = self.order.at(positions.astype(np.int64))
            for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True):
                yield list(zip(epoch, index, strict=True))
            start += self.layout.size * ahead


def workers_here(requested: int | str, *, device: torch.device, local_ranks: int) -> int:
    """Return the number of worker processes per training process; ``auto`` is 0 on a CPU, whose
    cores train."""
    if requested != "auto":
        return int(requested)
    return (
        0
        if device.type == "cpu"
        else max(1, min(8, len(os.sched_getaffinity(0)) // local_ranks - 1))
    )


def in_memory(dataset: Any) -> bool:
    """Whether a data set is a tensor or a list of samples, so that workers would load nothing
    faster."""
    return isinstance(dataset, Tensor | list | tuple | TensorDataset)


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
    """Return batches and their weights for lists of (epoch, index) pairs; draw nothing from the
    global generator."""
    dataset = Batches(samples, collate)
    # a DataLoader would only add a profiler record (8 us) per batch
    if not workers and device.type != "cuda":
        return map(dataset.__getitem__, batches)
    options: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": False,
        "generator": torch.Generator(),
    }
    options |= {"prefetch_factor": max(2, math.ceil(ahead / workers)) if workers else None}
    options |= {
        "pin_memory": pinned and device.type == "cuda",
        "worker_init_fn": partial(_begin_worker, os.getpid()),
    }
    loading = DataLoader(dataset, batch_size=None, sampler=batches, collate_fn=_identity, **options)
    return _from_workers(loading) if workers else loading


def end_workers(error: BaseException | None) -> None:
    """Shut down DataLoader workers after an exception: its traceback, or that of a cause, keeps
    their iterator alive. Otherwise torch raises in unrelated code when a worker ends."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.data.dataloader.__file__:
                frame.clear()
        error = error.__cause__ or error.__context__


def _from_workers(loading: Iterable[tuple[Batch, float]]) -> Iterator[tuple[Batch, float]]:
    """Yield what the workers load. Raise RuntimeError if one has exited, however torch reports
    that."""
    try:
        yield from loading
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            f"a DataLoader worker exited without an error message ({error})"
        ) from error


def _begin_worker(parent: int, number: int) -> None:
    """End with the training process, and ignore stop signals: the training process handles them."""
    die_with(parent)
    on_stops(signal.SIG_IGN)


def _identity(batch: Any) -> Any:
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
    """Yield the micro-batches of each step of ``rank`` endlessly, from position ``start`` on.

    Use all batches of a group before the next group. Workers load two groups ahead. On CUDA the
    next micro-batch is copied while the current one is used."""
    batches_of_rank = _RankBatches(order, layout, rank=rank, start=start)
    keyed, ahead = SeededSamples(dataset, seed=seed, name="train"), 2 * layout.accumulate
    batches = iter(
        loader(
            keyed,
            collate,
            batches_of_rank,
            workers=workers,
            device=device,
            ahead=ahead,
            pinned=pinned,
        )
    )
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
    ahead = 2 if device.type == "cuda" else 1  # the batch to copy in advance is then loaded already
    try:
        while True:
            while len(weights) < ahead:
                load()
            yield Group(
                islice(moved, layout.accumulate), weights.popleft(), apart=bool(layout.grain)
            )
    finally:
        batches = iter(())  # ends the workers, even if the caller keeps a group


def transferred(
    batches: Iterator[Batch], device: torch.device, *, pinned: bool = True
) -> Iterator[Batch]:
    """Yield the batches on ``device``; on CUDA a second stream copies each while the previous one
    is used.

    Args: ``batches``: in host memory. ``device``: the target device. ``pinned``: whether they are
    in pinned memory; if not, the host waits for each copy.
    """
    if device.type != "cuda" or not pinned:
        yield from (
            batches if device.type == "cpu" else (to_device(batch, device) for batch in batches)
        )
        return
    copies = torch.cuda.Stream(device)
    current: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(copies):
            upcoming = to_device(batch, device)
        if current is not None:
            yield current
        torch.cuda.current_stream(device).wait_stream(copies)
        for value in upcoming.values():
            if torch.is_tensor(value):
                # keeps its memory from being reused too early
                value.record_stream(torch.cuda.current_stream(device))
        current = upcoming
    if current is not None:
        yield current


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {
        k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()
    }
