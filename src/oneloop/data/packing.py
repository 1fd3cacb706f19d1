"""Items of some lengths into few bins of one capacity, such as texts into rows of tokens: best fit decreasing (BFD).

Each item, longest first, goes into the fullest bin that still takes it, else into a new one: at most 11/9 of the fewest
bins, and four more (Johnson 1973). Bins of the same room are alike and so are items of the same length, so both move in
crowds: the work is by the distinct lengths and rooms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bins:
    """Which items lie in which bin.

    >>> bins = packed(np.array([3, 6, 5, 2]), capacity=8)
    >>> [one.tolist() for one in bins]
    [[0, 2], [1, 3]]
    """

    members: NDArray[np.int64]
    """(items,), bin after bin: within a bin they rise, and so do the bins' first ones"""
    ends: NDArray[np.int64]
    """(bins,), where each bin ends in ``members``"""

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
        raise ValueError(
            f"bins of capacity {capacity} take lengths from 1 to {capacity}, but {wrong.size} of {len(lengths)} are "
            f"outside, the first at index {wrong[0]}: {lengths[wrong[0]]}; leave these out or cut them, or raise the "
            "capacity"
        )


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
        self._there = 0
        """a bit for each room that some bin has: a whole number finds the next one faster than a tree"""

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
