"""Samples whose random numbers depend only on (seed, epoch, index), not on the process that loads
them. If a data set draws none, the cost is negligible.

>>> samples = SeededSamples(dataset, seed=0)
>>> index, sample = samples[epoch, 7]
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from oneloop.basics.seeds import GOLDEN, mixed

Place = tuple[int, int]  # (epoch, index) of one sample

Collated = TypeVar("Collated")


class SeededSamples(Dataset[Any]):
    """A data set that is indexed by (epoch, index) and returns (index, sample).

    The global generators of torch, Python and numpy behave as if they were seeded before each
    sample. Most data sets draw from torch only, or not at all. :meth:`batch` therefore checks
    afterwards whether Python's or numpy's generator was used (about 6 us). If so, it loads that
    batch again with seeds, and seeds every later sample. torch is always seeded (about 1 us),
    because draws inside ``torch.random.fork_rng()`` cannot be detected. Messages use ``name``.

    A set with ``__getitems__`` loads whole batches if it draws nothing. The first batch checks that
    both ways agree."""

    def __init__(self, dataset: Any, *, seed: int, name: str = "") -> None:
        self.dataset, self.seed, self.name = dataset, seed, name
        self._loading: Place | None = None  # the sample being loaded
        self._draws = False  # whether the set has drawn from Python's or numpy's generator
        self._together: bool | None = None if hasattr(dataset, "__getitems__") else False
        """whether ``__getitems__`` is used; None: not checked yet"""
        self._epoch, self._prefix = -1, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> tuple[int, Any]:
        return self._one_by_one([place], self._seed)[0]

    def batch(
        self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Collated]
    ) -> Collated:
        """Return the collated samples of these (epoch, index) pairs; ``collate`` may draw random
        numbers, too. Raise SampleError if a sample cannot be loaded; the message names the sample,
        the set and the worker."""
        try:
            return self._batch(places, collate)
        except Exception as error:
            if self._loading is None:  # raised by collate
                raise
            kind = UnfitSample if isinstance(error, ValueError) else SampleError
            raise kind(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        assert self._loading is not None
        worker = get_worker_info()
        by = "" if worker is None else f" by data worker {worker.id}"
        of = f"the {self.name} set" if self.name else type(self.dataset).__name__
        return (
            f"sample {self._loading[1]} of {of} cannot be loaded{by}: {type(error).__name__}: "
            f"{error}"
        )

    def _batch(
        self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Collated]
    ) -> Collated:
        # for one sample, seeding costs no more than checking
        if not self._draws and len(places) > 1:
            if self._together is None:
                self._together = self._same_together(places)
            _seed_others(0)
            samples = (
                self._load_together(places)
                if self._together
                else self._one_by_one(places, self._seed_torch)
            )
            if samples is not None:
                collated = collate(samples)
                if _next_draws() == _UNTOUCHED:
                    return collated
            self._draws = True
        return collate(self._one_by_one(places, self._seed))

    def _one_by_one(
        self, places: Sequence[Place], seed: Callable[[Place], object]
    ) -> list[tuple[int, Any]]:
        samples, dataset = [], self.dataset
        for place in places:
            self._loading = place
            seed(place)
            samples.append((place[1], dataset[place[1]]))
        self._loading = None
        return samples

    def _load_together(self, places: Sequence[Place]) -> list[tuple[int, Any]] | None:
        """Load with ``__getitems__``. Return None if that drew from torch: each sample then needs
        its own seed."""
        indices = [index for _, index in places]
        self._seed_torch(places[-1])
        before = torch.default_generator.get_state()
        try:
            samples = list(zip(indices, self.dataset.__getitems__(indices), strict=True))
        except Exception:
            self._one_by_one(places, self._seed_torch)  # finds the failing sample
            raise
        return samples if torch.equal(torch.default_generator.get_state(), before) else None

    def _same_together(self, places: Sequence[Place]) -> bool:
        single = [self[place][1] for place in places]
        self._seed_torch(places[0])
        return _equal(single, list(self.dataset.__getitems__([index for _, index in places])))

    def _seed_torch(self, place: Place) -> int:
        """Seed torch with the key of (seed, epoch, index) and return the key."""
        epoch, index = place
        if epoch != self._epoch:
            self._epoch, self._prefix = epoch, mixed(mixed(GOLDEN, self.seed), epoch)
        number = mixed(self._prefix, index) >> 1  # key(seed, epoch, index)
        torch.default_generator.manual_seed(number)
        return number

    def _seed(self, place: Place) -> None:
        _seed_others(self._seed_torch(place))


class SampleError(RuntimeError):
    """A sample that cannot be loaded."""


class UnfitSample(SampleError, ValueError):
    """A sample that cannot be loaded because its content is invalid (ValueError)."""


class Batches(Dataset[Any]):
    """Collated batches of a :class:`SeededSamples` set, indexed by lists of (epoch, index)
    pairs."""

    def __init__(
        self, samples: SeededSamples, collate: Callable[[list[tuple[int, Any]]], Any]
    ) -> None:
        self.samples, self.collate = samples, collate

    def __getitem__(self, places: Sequence[Place]) -> Any:
        return self.samples.batch(places, self.collate)


def _seed_others(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def _next_draws(python: Any = random, numpy: Any = np.random) -> tuple[int, float, float]:
    """Return the next draws of Python's and numpy's generators."""
    return python.getrandbits(128), numpy.random_sample(), numpy.random_sample()


_UNTOUCHED = _next_draws(random.Random(0), np.random.RandomState(0))


def _equal(a: Any, b: Any) -> bool:
    """Return whether two samples are equal, recursively; False if they cannot be compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    try:
        return bool(a == b)
    except Exception:
        return False
