"""Samples by length: packing into bins, and an order whose steps have samples of similar length."""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import key
from oneloop.data.order import EpochsAndIndices, Ordered, epoch_keys, permuted


def packed(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return bins by best fit decreasing; among equal lengths, the lower index comes first.

    >>> members, edges = packed(np.array([3, 6, 5, 2]), capacity=8)
    >>> [members[start:stop].tolist() for start, stop in pairwise(edges)]
    [[0, 2], [1, 3]]

    Args:
        lengths: (items,), length of each item, from 1 to ``capacity``.
        capacity: largest sum of the lengths of a bin.

    Returns:
        The items, bin after bin, ascending in each bin, where the bins ascend by their first item;
        and, (bins + 1,), where each bin starts, and the last one stops.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    bin_of = np.empty_like(lengths)
    bin_of[longest_first] = _assign_bins(lengths[longest_first], capacity)

    # Number the bins by their first item.
    firsts = np.unique(bin_of, return_index=True)[1]
    bin_of = np.argsort(np.argsort(firsts))[bin_of]
    members = np.argsort(bin_of, kind="stable")
    return members, np.append(0, np.cumsum(np.bincount(bin_of)))


def _assign_bins(descending: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the bin of each length (descending), numbered in the order of opening."""
    bin_of = np.empty_like(descending)
    bins_by_space: defaultdict[int, deque[int]] = defaultdict(deque)
    # bit set of the free spaces: finding the next one is faster than in a tree
    occupied = 0
    opened = 0
    for item, length in enumerate(descending.tolist()):
        # Take the fullest bin that has room, or open one.
        fitting = occupied >> length
        if fitting:
            lowest = fitting & -fitting  # its lowest bit that is set
            space = length + lowest.bit_length() - 1
            bins = bins_by_space[space]
            number = bins.popleft()
            if not bins:
                occupied ^= 1 << space
        else:
            space = capacity
            number = opened
            opened += 1

        # Keep what is left of it.
        bin_of[item] = number
        space -= length
        if space:
            bins_by_space[space].append(number)
            occupied |= 1 << space
    return bin_of


class Bucketed(Ordered):
    """An endless seeded order by similar length: position -> (epoch, index).

    It is a pure function of the position, like :class:`oneloop.data.order.Order`, and caches the
    last two windows. The remainder of an epoch is spread over its windows.

    >>> epochs, indices = Bucketed(lengths, seed=0, batch=32)[3_200:3_232]  # one step, by length

    Args:
        lengths: length of each sample.
        seed: seed of the order.
        batch: samples of a step.
        window: steps whose samples are sorted together. Larger windows pad less, smaller ones
            shuffle better.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        seed: int,
        batch: int,
        window: int = 50,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.size = len(self.lengths)
        self.seed = seed
        self.batch = batch
        self.window = window
        self._window = lru_cache(maxsize=2)(self._window_indices)

    def at(self, positions: NDArray[np.int64]) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        if not positions.size:
            return positions, positions
        flat = positions.reshape(-1)
        indices = np.empty_like(flat)
        epochs, offsets = np.divmod(flat, self.size)

        # Find the window of each position, as _window_indices cuts them.
        phases, steps, numbers = self._window_layout(epochs)
        step = (offsets + phases) // self.batch
        windows = ((step + 1) * numbers - 1) // steps

        # Epoch and window ascend with the position, so the sorted positions form one run per
        # window.
        ascending = np.argsort(flat, kind="stable")
        changes = np.diff(epochs[ascending]) | np.diff(windows[ascending])
        for run in np.split(ascending, np.flatnonzero(changes) + 1):
            begin, row = self._window(int(epochs[run[0]]), int(windows[run[0]]))
            indices[run] = row[offsets[run] - begin]
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)

    def _window_layout(self, epoch: Any) -> tuple[Any, Any, Any]:
        """Return where an epoch starts in its step (samples), and its numbers of steps and windows.

        Args:
            epoch: a number, or an array of numbers.
        """
        phase = epoch * self.size % self.batch
        steps = -(-(phase + self.size) // self.batch)
        return phase, steps, np.maximum(steps // self.window, 1)

    def _window_indices(self, epoch: int, number: int) -> tuple[int, NDArray[np.int64]]:
        """Return the offset of a window in its epoch, and its sample indices."""
        phase, steps, windows = self._window_layout(epoch)
        first = number * steps // windows
        last = (number + 1) * steps // windows
        begins_of_steps = np.arange(first, last + 1, dtype=np.int64) * self.batch - phase
        edges = np.clip(begins_of_steps, 0, self.size)

        # Shuffle the epoch, take this window, and sort it by length.
        offsets = np.arange(edges[0], edges[-1], dtype=np.uint64)
        epoch_key = epoch_keys(np.array([epoch], dtype=np.int64), self.seed)
        keys = np.repeat(epoch_key, len(offsets))
        row = permuted(offsets, self.size, keys).astype(np.int64)
        row = row[np.argsort(self.lengths[row], kind="stable")]

        # Shuffle the steps. The partial steps at an epoch's ends keep their position, but draw
        # their run of lengths like all steps.
        shares = np.diff(edges)
        numbers = np.arange(len(shares), dtype=np.int64)
        draws = epoch_keys(numbers, key(self.seed, epoch, number))
        ranks = np.argsort(draws, kind="stable")
        by_length = np.empty_like(shares)
        by_length[ranks] = shares
        begins = (np.cumsum(by_length) - by_length)[ranks]
        moves = begins - (edges[:-1] - edges[0])  # of each step, in samples
        return int(edges[0]), row[np.repeat(moves, shares) + np.arange(len(row))]
