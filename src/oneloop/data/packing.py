"""Samples by length: packed into bins, or ordered so that those of a step are of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import key
from oneloop.data.order import Places, epoch_keys, permuted, positions_of


@dataclass(frozen=True)
class Bins:
    """Which items lie in which bin.

    >>> bins = packed(np.array([3, 6, 5, 2]), capacity=8)
    >>> [one.tolist() for one in bins]
    [[0, 2], [1, 3]]
    """

    members: NDArray[np.int64]  # (items,), bin after bin: within a bin they rise, and so do the bins' first ones
    ends: NDArray[np.int64]  # (bins,), where each bin ends in ``members``

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """Return the items of one bin; raise IndexError if there is no such bin."""
        number = range(len(self))[number]
        return self.members[self.ends[number - 1] if number else 0 : self.ends[number]]


def packed(lengths: NDArray[np.int64], capacity: int) -> Bins:
    """Return bins by best fit decreasing; among equal lengths, the lower index comes first.

    Raise ValueError if a length is outside 1..capacity, or if the capacity is below 1.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    _check(lengths, capacity)
    if not len(lengths):
        return Bins(lengths, lengths)
    longest_first = np.argsort(-lengths, kind="stable")
    held_by = np.empty_like(lengths)
    held_by[longest_first] = _bins_of(lengths[longest_first], capacity)
    firsts = np.unique(held_by, return_index=True)[1]
    numbers = np.empty_like(firsts)
    numbers[np.argsort(firsts)] = np.arange(len(firsts))
    held_by = numbers[held_by]
    return Bins(np.argsort(held_by, kind="stable"), np.cumsum(np.bincount(held_by)))


def _check(lengths: NDArray[np.int64], capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"bins of capacity {capacity} hold nothing; the capacity must be 1 or more")
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if wrong.size:
        first = f"the first at index {wrong[0]}: {lengths[wrong[0]]}"
        wide = f"{wrong.size} of {len(lengths)} lengths are not from 1 to {capacity}, {first}"
        raise ValueError(f"{wide}; remove these samples, cut them, or raise the capacity")


def _bins_of(falling: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin of each of these lengths, numbered as they are opened."""
    found = np.empty_like(falling)
    firsts = np.flatnonzero(np.diff(falling, prepend=-1))
    rooms = _Rooms()
    opened = 0
    for place, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(falling)], strict=True):
        length = int(falling[place])
        while place < stop:
            room = rooms.least(length)
            if room is None:
                room, each = capacity, capacity // length
                bins = [*range(opened, opened - (place - stop) // each)]
                opened += len(bins)
            else:
                # A bin that takes one is then the fullest that may take the next: it takes all that it can.
                each = room // length
                bins = rooms.take(room, -((place - stop) // each))
            last = min(stop - place, each * len(bins)) - each * (len(bins) - 1)
            filled = np.repeat(np.array(bins), each)[: each * (len(bins) - 1) + last]
            found[place : place + len(filled)] = filled
            place += len(filled)
            rooms.put(room - each * length, bins[:-1])
            rooms.put(room - last * length, bins[-1:])
    return found


class _Rooms:
    """Bins by the room that is left in them."""

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}
        self._there = 0  # a bit for each room that some bin has: a whole number finds the next one faster than a tree

    def least(self, length: int) -> int | None:
        above = self._there >> length
        return length + (above & -above).bit_length() - 1 if above else None

    def take(self, room: int, most: int) -> list[int]:
        bins = self._bins[room]
        taken, self._bins[room] = bins[:most], bins[most:]
        if not self._bins[room]:
            self._there ^= 1 << room
        return taken

    def put(self, room: int, bins: list[int]) -> None:
        if bins and room:
            self._bins.setdefault(room, []).extend(bins)
            self._there |= 1 << room


class Bucketed:
    """Endless seeded order by similar length: position -> (epoch, index).

    A pure function of the position, as :class:`oneloop.data.order.Order`; the last two windows are kept. ``window``
    steps of ``batch`` samples are sorted together: more pad less, fewer shuffle better. What remains of an epoch is
    spread over its windows. A step in two epochs draws from both. Raises ValueError if an argument is not positive.

    >>> epochs, indices = Bucketed(lengths, seed=0, batch=32)[3_200:3_232]      # one step, by length
    """

    def __init__(self, lengths: Sequence[int] | NDArray[np.int64], *, seed: int, batch: int, window: int = 50) -> None:
        self.lengths = np.asarray(lengths)
        self.size, self.seed, self.batch, self.window = len(self.lengths), seed, batch, window
        if self.size < 1:
            raise ValueError("an order needs at least one sample, got no lengths")
        if batch < 1 or window < 1:
            raise ValueError(f"a step and a window must be 1 or more, got a batch of {batch} and a window of {window}")
        self._windows: dict[tuple[int, int], tuple[int, NDArray[np.int64]]] = {}

    def __getitem__(self, window: slice) -> Places:
        return self.at(positions_of(window))

    def at(self, positions: NDArray[np.int64]) -> Places:
        """Epochs and sample indices of these positions, each of the shape of ``positions``."""
        flat = positions.reshape(-1)
        indices = np.empty_like(flat)
        epochs, places = np.divmod(flat, self.size)
        phases, steps, numbers = self._cut(epochs)
        windows = (((places + phases) // self.batch + 1) * numbers - 1) // steps  # as _laid_out cuts them
        # Both rise with the position, so sorted positions fall into runs of one window.
        rising = np.argsort(flat, kind="stable")
        changes = np.diff(epochs[rising]).astype(bool) | np.diff(windows[rising]).astype(bool)
        for run in np.split(rising, np.flatnonzero(changes) + 1) if flat.size else ():
            begin, row = self._window(int(epochs[run[0]]), int(windows[run[0]]))
            indices[run] = row[places[run] - begin]
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)

    def _cut(self, epoch: Any) -> tuple[Any, Any, Any]:
        """How far into a step an epoch begins, how many steps it touches, and into how many windows they are cut."""
        phase = epoch * self.size % self.batch
        steps = -(-(phase + self.size) // self.batch)
        return phase, steps, np.maximum(steps // self.window, 1)

    def _window(self, epoch: int, number: int) -> tuple[int, NDArray[np.int64]]:
        found = self._windows.get((epoch, number))
        if found is None:
            found = self._laid_out(epoch, number)
            self._windows = {**dict([*self._windows.items()][-1:]), (epoch, number): found}
        return found

    def _laid_out(self, epoch: int, number: int) -> tuple[int, NDArray[np.int64]]:
        phase, steps, windows = self._cut(epoch)
        first, last = number * steps // windows, (number + 1) * steps // windows
        edges = np.clip(np.arange(first, last + 1, dtype=np.int64) * self.batch - phase, 0, self.size)
        places = np.arange(edges[0], edges[-1], dtype=np.uint64)
        of_epoch = epoch_keys(np.array([epoch], dtype=np.int64), self.seed)
        row = permuted(places, self.size, np.repeat(of_epoch, len(places))).astype(np.int64)
        row = row[np.argsort(self.lengths[row], kind="stable")]
        # The smaller shares at an epoch's ends keep their place; which run of the row they are is drawn as for all.
        shares = np.diff(edges)
        drawn = epoch_keys(np.arange(len(shares), dtype=np.int64), key(self.seed, epoch, number))
        ranks = np.argsort(drawn, kind="stable")
        by_length = np.empty_like(shares)
        by_length[ranks] = shares
        begins = (np.cumsum(by_length) - by_length)[ranks]
        moved = row[np.repeat(begins - (edges[:-1] - edges[0]), shares) + np.arange(len(row))]
        return int(edges[0]), moved
