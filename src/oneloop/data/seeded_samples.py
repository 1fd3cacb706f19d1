"""Samples whose random numbers depend only on (seed, epoch, index).

They do not depend on the process that loads a sample. If a data set draws none, the cost is
negligible.

>>> samples = SeededSamples(dataset, seed=0)
>>> index, sample = samples[epoch, 7]
"""

import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.loaded_step import LOADED_FOR
from oneloop.basics.seeds import GOLDEN, mixed, seed_others
from oneloop.data.skipped_rows import SkipSample

Place = tuple[int, int]  # (epoch, index) of one sample


class StepPlaces(list[Place]):
    """The places of a micro-batch of a step."""

    position = 0  # of the step's first sample in the order of all samples


SKIPPED = "skipped samples"  # in a batch that was loaded: index and reason of each
STARTS = -2  # in place of the index of a sample: the data worker starts

Collated = TypeVar("Collated")


class SeededSamples(Dataset[Any]):
    """A data set that is indexed by (epoch, index) and returns (index, sample).

    The global generators of torch, Python and numpy behave as if they were seeded before each
    sample. Most data sets draw from torch only, or not at all. :meth:`batch` therefore checks
    afterwards whether Python's or numpy's generator was used (about 6 us). If so, it loads that
    batch again with seeds, and seeds every later sample. torch is always seeded (about 1 us),
    because draws inside ``torch.random.fork_rng()`` cannot be detected.

    A set with ``__getitems__`` loads whole batches if it draws nothing.

    Args:
        dataset: a map-style data set.
        seed: seed of the random numbers.
        name: name of the set in messages.
    """

    def __init__(self, dataset: Any, *, seed: int, name: str = "") -> None:
        self.dataset = dataset
        self.seed = seed
        self.name = name
        # index of the sample that each data worker reads, in shared memory; STARTS, or -1: none
        self.reading: Any = [-1]
        self._worker = 0  # this process, in that list
        self._draws = False  # whether the set has drawn from Python's or numpy's generator

        # Whether the set leaves out samples by raising SkipSample; the reasons of the last batch.
        self.skips = bool(getattr(dataset, "skips", False))
        self.skipped: list[tuple[int, str]] = []
        self._together = hasattr(dataset, "__getitems__") and not self.skips

        # The epoch of the last sample, and the part of its key that depends on the epoch only:
        # computing it for each sample would cost 1 us.
        self._epoch = -1
        self._prefix = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> tuple[int, Any]:
        return self.good([place])[0]

    def good(self, places: Sequence[Place], *, torch_only: bool = False) -> list[tuple[int, Any]]:
        """Return (index, sample) at these places, without samples that the set leaves out.

        Args:
            places: (epoch, index) of each sample.
            torch_only: seed only torch's generator before each sample.

        Raises:
            UnfitRow: no sample is left.
        """
        samples = []
        self.skipped = []
        for place in places:
            self.reading[self._worker] = place[1]
            number = self._seed_torch(place)
            if not torch_only:
                seed_others(number)
            try:
                samples.append((place[1], self.dataset[place[1]]))
            except SkipSample as error:
                if not self.skips:
                    raise
                self.skipped.append((place[1], str(error)))
        self.reading[self._worker] = -1
        if places and not samples:
            raise UnfitRow(
                f"no row of a micro-batch of {len(places):,} can be used, the first: "
                f"{self.skipped[0][1]}; correct the rows, or set a larger batch.micro"
            ) from SkipSample(self.skipped[0][1])
        return samples

    def batch(
        self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Collated]
    ) -> Collated:
        """Return collated samples.

        Args:
            places: (epoch, index) of each sample.
            collate: makes the batch from (index, sample) pairs; may draw random numbers, too.

        Raises:
            SampleError: a sample cannot be loaded; the message names the sample, the set and the
                worker.
        """
        worker = get_worker_info()
        self._worker = 0 if worker is None else worker.id
        token = LOADED_FOR.set(getattr(places, "position", None))
        try:
            return self._batch(places, collate)
        except Exception as error:
            if self.reading[self._worker] < 0:  # raised by collate
                raise
            by = "" if worker is None else f" by data worker {worker.id}"
            message = (
                f"{self._sample(self._worker)} cannot be loaded{by}: {type(error).__name__}: "
                f"{error}"
            )
            raise _kind(error)(message) from error
        finally:
            LOADED_FOR.reset(token)

    def _sample(self, worker: int) -> str:
        of = f"the {self.name} set" if self.name else type(self.dataset).__name__
        return f"sample {self.reading[worker]} of {of}"

    def now(self, worker: int) -> str:
        """Describe what a data worker is doing, or this process, if it has none."""
        who = "it" if isinstance(self.reading, list) else f"data worker {worker}"
        if self.reading[worker] == STARTS:
            return f"{who} starts"
        if self.reading[worker] < 0:
            return f"{who} collates a batch"
        fetched = self.dataset.waits() if hasattr(self.dataset, "waits") else ""
        return f"{who} reads {self._sample(worker)}{fetched}"

    def _batch(
        self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Collated]
    ) -> Collated:
        # Seed torch only, and check afterwards whether another generator was used. For one sample,
        # seeding all of them costs no more than this check.
        if not self._draws and len(places) > 1:
            seed_others(0)
            if self._together:
                samples = self._load_together(places)
            else:
                samples = self.good(places, torch_only=True)
            if samples is not None:
                collated = collate(samples)
                if _next_draws() == _UNTOUCHED:
                    return collated
            self._draws = True

        # The set draws: seed all generators before each sample.
        return collate(self.good(places))

    def _load_together(self, places: Sequence[Place]) -> list[tuple[int, Any]] | None:
        """Load with ``__getitems__``.

        Return None if that drew from torch, so that each sample needs its own seed; or if it has
        failed, so that loading one by one finds the sample.
        """
        indices = [index for _, index in places]
        self._seed_torch(places[-1])
        before = torch.default_generator.get_state()
        self.reading[self._worker] = indices[0]
        try:
            samples = list(zip(indices, self.dataset.__getitems__(indices), strict=True))
        except Exception:
            return None
        self.reading[self._worker] = -1
        drew = not torch.equal(torch.default_generator.get_state(), before)
        return None if drew else samples

    def _seed_torch(self, place: Place) -> int:
        """Seed torch with the key of (seed, epoch, index) and return the key."""
        epoch, index = place
        if epoch != self._epoch:
            self._epoch = epoch
            self._prefix = mixed(mixed(GOLDEN, self.seed), epoch)
        number = mixed(self._prefix, index) >> 1  # key(seed, epoch, index)
        torch.default_generator.manual_seed(number)
        return number


class SampleError(RuntimeError):
    """A sample that cannot be loaded."""


class UnfitRow(SampleError, BadInput):
    """A sample whose content oneloop has rejected: the message is enough, without a traceback."""


class UnreadSample(SampleError, Unavailable):
    """A sample that cannot be read from its storage; the message is enough."""


def _kind(error: Exception) -> type[SampleError]:
    """Return the class of the error for a sample whose data set has raised ``error``.

    A data worker passes on no more of an exception than its class and its text.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_globals.get("__name__", "").startswith("oneloop.")
    if ours and isinstance(error, ValueError):
        return UnfitRow
    return UnreadSample if ours and isinstance(error, OSError) else SampleError


class Batches(Dataset[Any]):
    """Collated batches of a :class:`SeededSamples` set.

    They are indexed by lists of (epoch, index) pairs.
    """

    def __init__(
        self, samples: SeededSamples, collate: Callable[[list[tuple[int, Any]]], Any]
    ) -> None:
        self.samples = samples
        self.collate = collate

    def __getitem__(self, places: Sequence[Place]) -> Any:
        collated = self.samples.batch(places, self.collate)
        if self.samples.skipped:
            # They travel with the batch, from a data worker to the training process.
            collated[0][SKIPPED] = self.samples.skipped
        return collated


def _next_draws(python: Any = random, numpy: Any = np.random) -> tuple[int, float, float]:
    """Return the next draws of Python's and numpy's generators."""
    return python.getrandbits(128), numpy.random_sample(), numpy.random_sample()


_UNTOUCHED = _next_draws(random.Random(0), np.random.RandomState(0))
"""the next draws after ``seed_others(0)``"""
