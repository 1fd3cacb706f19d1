"""The micro-batches of a step: loaded by worker processes and copied to the device in advance."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import TensorDataset

from oneloop.basics.heartbeats import BEATS
from oneloop.basics.system.start_methods import start_context
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.data_workers import from_workers, load_by_workers
from oneloop.data.order import Ordered
from oneloop.data.seeded_samples import (
    SKIPPED,
    STARTS,
    Batches,
    Place,
    SeededSamples,
    StepPlaces,
)
from oneloop.data.skipped_rows import SKIPPED_ROWS

Batch = dict[str, Any]


@dataclass
class Group:
    """The micro-batches of one step on this process, and their weight.

    The weight is the divisor of the summed loss.
    """

    batches: Iterator[Batch]  # on the device; the next one is copied while the current one is used
    weights: list[float]  # weight of each micro-batch, known before the first is used

    # whether the total must be bit-identical on every layout; the ranks then exchange every single
    # weight
    apart: bool = False

    total: float = math.nan  # weight of the global batch, after the all-reduce
    stop: bool = False  # whether any rank was requested to stop after this step
    save: bool = False  # whether the time for a save after this step has come, by rank 0's clock
    used: bool = False  # whether a loop over the group has begun, or the next group

    @property
    def weight(self) -> float:
        """Return the summed weight of this process's samples."""
        return sum(self.weights)

    def __iter__(self) -> Iterator[Any]:
        if self.used:
            raise RuntimeError(
                "the batches of this group were used already, or the next group was taken; keep "
                "them before that: batches = list(group)"
            )
        self.used = True
        return self.batches

    def __len__(self) -> int:
        return len(self.weights)

    def addends(self, rank: int, ranks: int) -> list[float]:
        """Return the values whose sums over the ranks, added by ``rounded_sum``, are the total.

        This is the weight of this rank, or with ``apart`` a slot for each micro-batch of all ranks.
        """
        if not self.apart:
            return [self.weight]
        number = len(self.weights)
        slots = [0.0] * (number * ranks)
        first = number * rank
        slots[first : first + number] = self.weights
        return slots


class CollateWithWeight:
    """A collate function that also returns the weight: [(index, sample)] -> (batch, weight).

    ``batch["index"]`` holds the indices of the samples.

    Args:
        collate: makes a batch from samples.
        weight: returns the weight of a batch as a tensor of one element.
        sample_weight: weight of a sample if all have the same; ``weight`` is then not called.
        dtype: float32 tensors are converted to it.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Batch],
        weight: Callable[[Batch], Tensor],
        *,
        sample_weight: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.collate = collate
        self.weight = weight
        self.sample_weight = sample_weight
        self.dtype = dtype

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[Batch, float]:
        indices, values = zip(*samples, strict=True)
        batch = self.completed(self.collate(list(values)), indices)
        if self.sample_weight is not None:
            return batch, self.sample_weight * len(indices)
        return batch, float(self.weight(batch).numpy())

    def completed(self, batch: Batch, indices: Sequence[int]) -> Batch:
        """Add the sample indices to a collated batch and convert its float32 tensors.

        Args:
            batch: is changed.
            indices: index of each sample.

        Returns:
            The batch.
        """
        batch["index"] = torch.tensor(indices)
        if self.dtype is not torch.float32:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.dtype is torch.float32:
                    batch[name] = value.to(self.dtype)
        return batch


def _rank_batches(
    order: Ordered, layout: BatchLayout, *, rank: int, start: int
) -> Iterator[StepPlaces]:
    """Yield the endless micro-batches of (epoch, index) pairs of a rank, from this position on."""
    share = layout.offsets(rank)

    # Compute several steps at once, because the overhead of numpy's calls dominates.
    ahead = max(1, 4096 // len(share))
    while True:
        steps = start + layout.size * np.arange(ahead)
        positions = (steps[:, None] + share[None, :]).reshape(-1, layout.each)
        epochs, indices = order.at(positions.astype(np.int64))
        firsts = steps.tolist()
        pairs = zip(epochs.tolist(), indices.tolist(), strict=True)
        for number, (epoch, index) in enumerate(pairs):
            places = StepPlaces(zip(epoch, index, strict=True))
            places.position = firsts[number // layout.accumulate]
            yield places
        start += layout.size * ahead


def in_memory(dataset: Any) -> bool:
    """Return whether a data set is a tensor or a list of samples.

    Workers would load such a set no faster.
    """
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
) -> Iterator[tuple[Batch, float]]:
    """Yield batches and their weights; draw nothing from the global generator.

    While a batch is awaited, the supervisor knows which sample is being read. Samples that were
    left out are listed.

    Args:
        samples: the data set.
        collate: makes a batch and its weight.
        batches: (epoch, index) of each sample, for each batch.
        workers: worker processes; 0: load in this process.
        device: the device that trains.
        ahead: batches that the workers load in advance.
        pinned: load into pinned memory if the device is CUDA.
    """
    dataset = Batches(samples, collate)
    loading: Iterator[tuple[Batch, float]]
    if workers:
        samples.reading = start_context().RawArray("q", [STARTS] * workers)
    if workers or device.type == "cuda":
        loading = from_workers(
            load_by_workers(
                dataset,
                workers,
                sampler=batches,
                prefetch_factor=max(2, math.ceil(ahead / workers)) if workers else None,
                pin_memory=pinned and device.type == "cuda",
            )
        )
    else:
        # A DataLoader would only add a profiler record (8 us) per batch.
        loading = map(dataset.__getitem__, batches)

    for number in count():
        # The workers take turns.
        BEATS.reads = partial(samples.now, number % len(samples.reading))
        try:
            batch = next(loading)
        except StopIteration:
            return
        finally:
            BEATS.reads = str
        if samples.skips:
            SKIPPED_ROWS.add(samples.name, batch[0].pop(SKIPPED, ()))
        yield batch


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
    """Yield the micro-batches of each step endlessly.

    Use all batches of a group before the next group. Workers load two groups ahead. On CUDA the
    next micro-batch is copied while the current one is used.

    Args:
        dataset: a map-style data set.
        collate: makes a batch and its weight.
        order: which sample is at which position.
        layout: how a step is divided.
        rank: this process.
        seed: seed of the samples' random numbers.
        start: first position, in samples.
        device: the device that trains.
        workers: worker processes of this process.
        pinned: whether batches are loaded into pinned memory on CUDA.
    """
    # A data set that fetches what it reads fetches it ahead.
    plans = []
    if hasattr(dataset, "announce"):
        plans = dataset.announce(order, layout, rank=rank, start=start)
    batches = iter(
        loader(
            SeededSamples(dataset, seed=seed, name="train"),
            collate,
            _rank_batches(order, layout, rank=rank, start=start),
            workers=workers,
            device=device,
            ahead=2 * layout.accumulate,
            pinned=pinned,
        )
    )
    loaded: deque[tuple[Batch, float]] = deque()
    weights: deque[list[float]] = deque()

    def load() -> None:
        group = list(islice(batches, layout.accumulate))
        loaded.extend(group)
        weights.append([weight for _, weight in group])

    def stream() -> Iterator[tuple[Batch, float]]:
        while True:
            if not loaded:
                load()
            yield loaded.popleft()

    moved = transferred(stream(), device, pinned=pinned)
    # Load a second group on CUDA, so that the batch to copy in advance is loaded already.
    groups_ahead = 2 if device.type == "cuda" else 1
    apart = bool(layout.grain)
    try:
        for step in count(groups_ahead):
            while len(weights) < groups_ahead:
                load()
            for plan in plans:
                plan.advance(step)
            group = (batch for batch, _ in islice(moved, layout.accumulate))
            yield Group(group, weights.popleft(), apart=apart)
    finally:
        batches = iter(())  # ends the workers, even if the caller keeps a group
        for plan in plans:
            plan.close()


def transferred(
    batches: Iterable[tuple[Batch, float]], device: torch.device, *, pinned: bool = True
) -> Iterator[tuple[Batch, float]]:
    """Yield the batches on ``device``; on CUDA a second stream copies each batch in advance.

    Args:
        batches: in host memory, with their weights.
        device: the target device.
        pinned: whether they are in pinned memory; if not, the host waits for each copy.
    """
    if device.type == "cpu":
        yield from batches
        return
    if device.type != "cuda" or not pinned:
        for batch, weight in batches:
            yield to_device(batch, device), weight
        return

    copies = torch.cuda.Stream(device)
    current: tuple[Batch, float] | None = None
    for batch, weight in batches:
        # Copy the next batch while the caller uses the current one.
        with torch.cuda.stream(copies):
            upcoming = to_device(batch, device)
        if current is not None:
            yield current

        # The caller's stream waits for the copy; the host does not.
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(copies)
        # keeps their memory from being reused too early
        recursively_apply(methodcaller("record_stream", stream), upcoming)
        current = upcoming, weight
    if current is not None:
        yield current


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device, and other values as they are.

    Its tensors are those in dicts, lists and tuples, at any depth.
    """
    # An Apple GPU would read host memory that is free already (pytorch #189690).
    move = methodcaller("to", device, non_blocking=device.type != "mps")
    moved: Batch = recursively_apply(move, batch)
    return moved
