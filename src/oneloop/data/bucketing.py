"""The order of samples whose lengths differ: those of one step are of similar length, so that padding is small.

Each epoch is a new permutation, cut into windows of some steps. Within a window the samples are sorted by length and
cut into the steps' shares, and the shares are put in a new order: steps of short and of long samples are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import key
from oneloop.data.order import Places, epoch_keys, permuted, positions_of


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
