"""The global order of samples: endless, seeded, and found in O(1) at any position by any rank.

Each epoch is a new permutation of the samples. It is computed, not stored: a Feistel network (Luby & Rackoff 1988)
over a power of two that holds the data set, walked until it falls inside (Black & Rogaway 2002).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import GOLDEN, key

_ROUNDS = 8


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer, elementwise."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


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
        bits = max(6, (size - 1).bit_length())  # on fewer, neighbours come out related
        self._right_bits = np.uint64(bits - bits // 2)
        self._right = np.uint64((1 << (bits - bits // 2)) - 1)
        self._left = np.uint64((1 << (bits // 2)) - 1)

    def __getitem__(self, window: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epochs and sample indices of the positions ``start:stop``, each of shape (stop - start,)."""
        if window.start is None or window.stop is None or window.step is not None or window.start < 0:
            raise ValueError(f"an order is endless: ask for positions start:stop, got {window}")
        return self.at(np.arange(window.start, window.stop, dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epochs and sample indices of these positions, each of the shape of ``positions``."""
        epochs, places = np.divmod(positions.reshape(-1), self.size)
        keys = _mix(epochs.astype(np.uint64) * np.uint64(GOLDEN) ^ np.uint64(key(self.seed)))
        indices = self._permute(places.astype(np.uint64), keys)
        outside = np.flatnonzero(indices >= self.size)
        while outside.size:  # about once, from 33 samples on: the domain is less than twice the size
            indices[outside] = self._permute(indices[outside], keys[outside])
            outside = outside[indices[outside] >= self.size]
        return epochs.reshape(positions.shape), indices.astype(np.int64).reshape(positions.shape)

    def _permute(self, places: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = places >> self._right_bits, places & self._right
        for turn in range(0, _ROUNDS, 2):
            left = left ^ (_mix(keys + right + np.uint64((turn << 40) + 1)) & self._left)
            right = right ^ (_mix(keys + left + np.uint64((turn << 40) + (1 << 39))) & self._right)
        return left << self._right_bits | right
