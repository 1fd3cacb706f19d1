"""The global order of samples: endless and seeded. Any rank computes any position in O(1).

Each epoch is a new permutation, computed and not stored: a Feistel network (Luby & Rackoff 1988)
over the next power of two, with cycle walking until the index is inside the data set (Black &
Rogaway 2002).
"""

import inspect
import json
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from oneloop.basics.seeds import GOLDEN, key

Int64Array = NDArray[np.int64]
EpochsAndIndices = tuple[Int64Array, Int64Array]  # epochs and sample indices

UInt64Array = NDArray[np.uint64]
_ROUNDS = 8
_MIN_BITS = 6  # with fewer bits, consecutive positions give correlated indices


def _mix(state: UInt64Array) -> UInt64Array:
    """Apply splitmix64's finalizer elementwise."""
    state = state ^ (state >> np.uint64(30))
    state = state * np.uint64(0xBF58476D1CE4E5B9)
    state = state ^ (state >> np.uint64(27))
    state = state * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permuted(positions: UInt64Array, sizes: int | UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Return the image of each position under a keyed permutation of ``range(size)``.

    Args:
        positions: (n,), each below its size.
        sizes: one size for all positions, or (n,).
        keys: (n,), each selects a permutation.
    """
    sizes = np.asarray(sizes, dtype=np.uint64)
    # The binary exponent of size - 1 is its number of bits.
    exponents = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]
    bits = np.maximum(exponents, _MIN_BITS).astype(np.uint64)

    # Walk the cycle until the image is inside the data set: about one more pass for sizes above
    # 32, because the domain is less than twice the size.
    images = _network(positions, keys, bits)
    sizes, bits = np.broadcast_arrays(sizes, bits, positions)[:2]
    outside = np.flatnonzero(images >= sizes)
    while outside.size:
        images[outside] = _network(images[outside], keys[outside], bits[outside])
        outside = outside[images[outside] >= sizes[outside]]
    return images


def _network(positions: UInt64Array, keys: UInt64Array, bits: UInt64Array) -> UInt64Array:
    """Apply the Feistel rounds: each half is mixed with a keyed hash of the other half."""
    one = np.uint64(1)
    left_bits = bits >> one
    right_bits = bits - left_bits
    left_mask = (one << left_bits) - one
    right_mask = (one << right_bits) - one
    left = positions >> right_bits
    right = positions & right_mask
    for turn in range(0, _ROUNDS, 2):
        number = turn << 40  # a different constant for each round
        hashed = _mix(keys + right + np.uint64(number + 1))
        left = left ^ (hashed & left_mask)
        hashed = _mix(keys + left + np.uint64(number + (1 << 39)))
        right = right ^ (hashed & right_mask)
    return left << right_bits | right


def epoch_keys(epochs: Int64Array, seed: int) -> UInt64Array:
    """Return a permutation key for each epoch and the seed."""
    spread = epochs.astype(np.uint64) * np.uint64(GOLDEN)
    return _mix(spread ^ np.uint64(key(seed)))


class Ordered(Protocol):
    """A map from positions to samples.

    It is an :class:`Order`, or the result of a data set's ``order`` method. If a step has copies of
    its samples, their number is the attribute ``copies``.
    """

    def __getitem__(self, window: slice) -> EpochsAndIndices:
        """Return epochs and sample indices of the positions ``start:stop``.

        Both have the shape (stop - start,).

        Raises:
            ValueError: the slice lacks start or stop, has a step, or starts below 0.
        """
        if None in (window.start, window.stop) or window.step is not None or window.start < 0:
            raise ValueError(f"an order is endless and requires a slice start:stop, got {window}")
        return self.at(np.arange(window.start, window.stop, dtype=np.int64))

    def at(self, positions: Int64Array) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""


class Order(Ordered):
    """An endless seeded order over ``size`` samples: position -> (epoch, index).

    >>> epochs, indices = Order(1797, seed=0)[10_000:10_064]      # any slice, O(its length)

    Raises:
        ValueError: ``size`` is less than 1, or a slice lacks start or stop.
    """

    def __init__(self, size: int, *, seed: int) -> None:
        if size < 1:
            raise ValueError(f"an order needs at least one sample, got {size}")
        self.size = size
        self.seed = seed

    def at(self, positions: Int64Array) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        epochs, offsets = np.divmod(positions.reshape(-1), self.size)
        keys = epoch_keys(epochs, self.seed)
        indices = permuted(offsets.astype(np.uint64), self.size, keys).astype(np.int64)
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)


class StoredOrder(Order):
    """The endless order of ``size`` samples as they are stored: position -> (epoch, index).

    Raises:
        ValueError: ``size`` is less than 1.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, seed=0)

    def at(self, positions: Int64Array) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        return np.divmod(positions, self.size)


def order_of(dataset: Any, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
    """Return the data set's order if it defines one, else a permutation.

    Args:
        dataset: a map-style data set; its order is ``dataset.order(seed=…, batch=…)``. Without
            ``shuffle``, the method gets ``shuffle=False``.
        seed: seed of the order.
        batch: samples of a step.
        shuffle: False: the samples of each set as they are stored.

    Raises:
        ValueError: ``shuffle`` is False, and the data set defines an order that does not take it.
    """
    if not callable(getattr(dataset, "order", None)):
        return Order(len(dataset), seed=seed) if shuffle else StoredOrder(len(dataset))
    order: Ordered
    if shuffle:
        order = dataset.order(seed=seed, batch=batch)
        return order
    if "shuffle" not in inspect.signature(dataset.order).parameters:
        raise ValueError(
            "data.shuffle false does not work with the order that "
            f"{type(dataset).__name__}.order defines; remove one of them, or let that method "
            "take shuffle"
        )
    order = dataset.order(seed=seed, batch=batch, shuffle=False)
    return order


def checked_order(dataset: Any, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
    """Return :func:`order_of`, after a check that it depends on these arguments only.

    Raises:
        ValueError: as :func:`order_of`; or two orders of the same arguments differ.
    """
    build = partial(order_of, dataset, seed=seed, batch=batch, shuffle=shuffle)
    order = build()
    if callable(getattr(dataset, "order", None)):
        again = order_hash(build(), len(dataset), batch, backwards=True)
        if again != order_hash(order, len(dataset), batch):
            raise ValueError(
                f"{type(dataset).__name__}.order() returned two orders for the same arguments, so "
                "the ranks and a resume would read other samples; let it depend on seed and batch "
                f"only, such as numpy.random.default_rng(seed) (seed {seed}, batch {batch})"
            )
    return order


def order_hash(
    order: Ordered, length: int, batch: int, *, position: int = 0, backwards: bool = False
) -> str:
    """Return a hash of the samples of four steps.

    Args:
        order: the order.
        length: samples of the data set.
        batch: samples of a step.
        position: first sample of one of these steps; the others are in the first three epochs.
        backwards: ask for the last of these steps first.
    """
    starts = [epoch * length // batch * batch for epoch in range(3)]
    steps = {}
    for start in sorted({*starts, position}, reverse=backwards):
        epochs, indices = order[start : start + batch]
        steps[start] = [epochs.tolist(), indices.tolist()]
    return xxh3_64_hexdigest(json.dumps(steps, sort_keys=True).encode())
