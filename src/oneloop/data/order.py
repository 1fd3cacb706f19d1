"""The global order of samples: endless, seeded, and found in O(1) at any position by any rank.

Each epoch is a new permutation of the samples. It is computed, not stored: a Feistel network (Luby & Rackoff 1988)
over a power of two that holds the data set, walked until it falls inside (Black & Rogaway 2002).
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import GOLDEN, key

Places = tuple[NDArray[np.int64], NDArray[np.int64]]
"""epochs and sample indices"""

Numbers = NDArray[np.uint64]
_ROUNDS = 8
_FEWEST_BITS = 6  # on fewer, neighbours come out related


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer, elementwise."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permuted(places: Numbers, sizes: int | Numbers, keys: Numbers) -> Numbers:
    """Where a keyed permutation of ``range(size)`` takes each place; every place may have a size of its own.

    Args:
        places: (n,), each below its size.
        sizes: of all, or (n,).
        keys: (n,), each chooses a permutation.
    """
    if isinstance(sizes, int):
        bits: Any = max(_FEWEST_BITS, (sizes - 1).bit_length())
    else:
        bits = np.maximum(np.frexp((sizes - np.uint64(1)).astype(np.float64))[1], _FEWEST_BITS).astype(np.int64)
    right_bits = np.uint64(bits - bits // 2) if isinstance(sizes, int) else (bits - bits // 2).astype(np.uint64)
    left_mask, right_mask = _mask(bits // 2), _mask(bits - bits // 2)

    def chosen(value: Any, which: NDArray[np.int64]) -> Any:
        return value[which] if isinstance(value, np.ndarray) else value

    found = _network(places, keys, right_bits, left_mask, right_mask)
    outside = np.flatnonzero(found >= sizes)
    while outside.size:  # about once, from 33 on: the domain is less than twice the size
        masks = chosen(right_bits, outside), chosen(left_mask, outside), chosen(right_mask, outside)
        found[outside] = _network(found[outside], keys[outside], *masks)
        outside = outside[found[outside] >= chosen(sizes, outside)]
    return np.asarray(found)


def _mask(bits: Any) -> Any:
    if isinstance(bits, int):
        return np.uint64((1 << bits) - 1)
    return (np.uint64(1) << bits.astype(np.uint64)) - np.uint64(1)


def _network(places: NDArray[np.uint64], keys: NDArray[np.uint64], shift: Any, left_mask: Any, right_mask: Any) -> Any:
    left, right = places >> shift, places & right_mask
    for turn in range(0, _ROUNDS, 2):
        left = left ^ (_mix(keys + right + np.uint64((turn << 40) + 1)) & left_mask)
        right = right ^ (_mix(keys + left + np.uint64((turn << 40) + (1 << 39))) & right_mask)
    return left << shift | right


def epoch_keys(epochs: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A key for each epoch of a seed."""
    return _mix(epochs.astype(np.uint64) * np.uint64(GOLDEN) ^ np.uint64(key(seed)))


class Order:
    """Endless seeded order over ``size`` samples: position -> (epoch, index).

    >>> epochs, indices = Order(1797, seed=0)[10_000:10_064]      # any slice, O(its length)

    Raises:
        ValueError: ``size`` is less than 1, or a slice is not two positions.
    """

    def __init__(self, size: int, *, seed: int) -> None:
        if size < 1:
            raise ValueError(f"an order needs at least one sample, got {size}")
        self.size = size
        self.seed = seed

    def __getitem__(self, window: slice) -> Places:
        """Epochs and sample indices of the positions ``start:stop``, each of shape (stop - start,)."""
        return self.at(positions_of(window))

    def at(self, positions: NDArray[np.int64]) -> Places:
        """Epochs and sample indices of these positions, each of the shape of ``positions``."""
        epochs, places = np.divmod(positions.reshape(-1), self.size)
        indices = permuted(places.astype(np.uint64), self.size, epoch_keys(epochs, self.seed))
        return epochs.reshape(positions.shape), indices.astype(np.int64).reshape(positions.shape)


class Ordered(Protocol):
    """What says which sample stands at a position: :class:`Order`, or what a data set's own ``order`` returns."""

    def __getitem__(self, window: slice) -> Places:
        """As :meth:`at`, for the positions ``start:stop``."""

    def at(self, positions: NDArray[np.int64]) -> Places:
        """Epochs and sample indices of these positions, each of the shape of ``positions``."""


def positions_of(window: slice) -> NDArray[np.int64]:
    """The positions of a slice of an endless order.

    Raises:
        ValueError: it is not two positions.
    """
    if window.start is None or window.stop is None or window.step is not None or window.start < 0:
        raise ValueError(f"an order is endless: ask for positions start:stop, got {window}")
    return np.arange(window.start, window.stop, dtype=np.int64)


def order_of(dataset: Any, *, seed: int, batch: int) -> Ordered:
    """The data set's own order, where it has one (``dataset.order(seed=…, batch=…)``), else a permutation of it.

    Args:
        dataset: map-style.
        seed: of the order.
        batch: samples of a step.
    """
    made: Ordered = (
        dataset.order(seed=seed, batch=batch) if hasattr(dataset, "order") else Order(len(dataset), seed=seed)
    )
    return made
