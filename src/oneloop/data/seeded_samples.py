"""Samples whose randomness is a function of (seed, epoch, index), whatever process loads them, and next to free where
nothing is drawn.

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

Place = tuple[int, int]
"""(epoch, index) of one sample"""

Made = TypeVar("Made")


class SeededSamples(Dataset[Any]):
    """A data set, asked by (epoch, index); gives (index, sample).

    torch's, Python's and numpy's global generators are as if they were seeded before each sample. Most sets draw
    nothing, or from torch only, and need not say so: :meth:`batch` sees afterwards whether Python's or numpy's
    generator was used (about 6 us); at the first time it loads that batch again, with seeds, and seeds each sample from
    then on. torch is seeded for each sample in any case (about 1 us): what is drawn inside ``torch.random.fork_rng()``
    leaves no trace. ``name`` is what the set is called in messages.

    A set with ``__getitems__`` loads many at once, as long as it draws nothing and gives the same as one by one, which
    is tried with the first batch.
    """

    def __init__(self, dataset: Any, *, seed: int, name: str = "") -> None:
        self.dataset, self.seed, self.name = dataset, seed, name
        self._at: Place | None = None  # the sample that is being loaded
        self._draws = False  # whether it was seen to draw from Python's or numpy's generator
        self._together: bool | None = None if hasattr(dataset, "__getitems__") else False
        """whether many are loaded at once; None: not tried yet"""
        self._epoch, self._prefix = -1, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> tuple[int, Any]:
        return self._one_by_one([place], self._seed)[0]

    def batch(self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Made]) -> Made:
        """What ``collate``, which may draw too, makes of the samples at these places.

        Raises:
            SampleError: a sample cannot be loaded: which one, of which set, by which process.
        """
        try:
            return self._batch(places, collate)
        except Exception as error:
            if self._at is None:  # of collate
                raise
            kind = UnfitSample if isinstance(error, ValueError) else SampleError
            raise kind(self._told(error)) from error

    def _told(self, error: Exception) -> str:
        assert self._at is not None
        worker = get_worker_info()
        by = "" if worker is None else f" by data worker {worker.id}"
        of = f"the {self.name} set" if self.name else type(self.dataset).__name__
        return f"sample {self._at[1]} of {of} cannot be loaded{by}: {type(error).__name__}: {error}"

    def _batch(self, places: Sequence[Place], collate: Callable[[list[tuple[int, Any]]], Made]) -> Made:
        if not self._draws and len(places) > 1:  # one sample is seeded as quickly as it is looked at
            if self._together is None:
                self._together = self._tried(places)
            _seed_others(0)
            samples = self._at_once(places) if self._together else self._one_by_one(places, self._seed_torch)
            if samples is not None:
                made = collate(samples)
                if _first() == _UNTOUCHED:
                    return made
            self._draws = True
        return collate(self._one_by_one(places, self._seed))

    def _one_by_one(self, places: Sequence[Place], seed: Callable[[Place], object]) -> list[tuple[int, Any]]:
        samples, dataset = [], self.dataset
        for place in places:
            self._at = place
            seed(place)
            samples.append((place[1], dataset[place[1]]))
        self._at = None
        return samples

    def _at_once(self, places: Sequence[Place]) -> list[tuple[int, Any]] | None:
        """None where torch was drawn from, so that each sample needs its own seed."""
        indices = [index for _, index in places]
        self._seed_torch(places[-1])
        before = torch.default_generator.get_state()
        try:
            samples = list(zip(indices, self.dataset.__getitems__(indices), strict=True))
        except Exception:
            self._one_by_one(places, self._seed_torch)  # which of them it was
            raise
        return samples if torch.equal(torch.default_generator.get_state(), before) else None

    def _tried(self, places: Sequence[Place]) -> bool:
        single = [self[place][1] for place in places]
        self._seed_torch(places[0])
        return _equal(single, list(self.dataset.__getitems__([index for _, index in places])))

    def _seed_torch(self, place: Place) -> int:
        """Seeds torch with the place's key, and returns the key."""
        epoch, index = place
        if epoch != self._epoch:
            self._epoch, self._prefix = epoch, mixed(mixed(GOLDEN, self.seed), epoch)
        number = mixed(self._prefix, index) >> 1  # key(seed, epoch, index)
        torch.default_generator.manual_seed(number)
        return number

    def _seed(self, place: Place) -> None:
        _seed_others(self._seed_torch(place))


class SampleError(RuntimeError):
    """A sample cannot be loaded."""


class UnfitSample(SampleError, ValueError):
    """A sample cannot be loaded, by a ValueError: what lies there is not what it should be."""


class Batches(Dataset[Any]):
    """Collated batches of a :class:`SeededSamples` set, asked by the places of their samples."""

    def __init__(self, samples: SeededSamples, collate: Callable[[list[tuple[int, Any]]], Any]) -> None:
        self.samples, self.collate = samples, collate

    def __getitem__(self, places: Sequence[Place]) -> Any:
        return self.samples.batch(places, self.collate)


def _seed_others(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def _first(python: Any = random, numpy: Any = np.random) -> tuple[int, float, float]:
    """The next draws of two generators."""
    return python.getrandbits(128), numpy.random_sample(), numpy.random_sample()


_UNTOUCHED = _first(random.Random(0), np.random.RandomState(0))


def _equal(a: Any, b: Any) -> bool:
    """Whether two samples, or parts of them, are the same; False where they cannot be compared."""
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
