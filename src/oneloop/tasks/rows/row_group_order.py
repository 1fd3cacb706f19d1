"""The order of samples that are stored in groups, such as the row groups of Parquet files.

A group can only be read as a whole.

A full permutation would read a group for nearly every sample. Instead, each epoch shuffles the
groups, cuts them into windows of a few groups, and shuffles the samples within each window. A
window can be read once and then dropped.

To let processes read different windows, the groups of an epoch are divided into lanes, each with
its own windows. A step is divided among the lanes: each has a part of equal length. A rank's share
of a step is some of these parts, so it reads only some lanes. The number of lanes depends on the
data and the batch size, never on the number of ranks.

If only some places of a step are the data set's (:class:`oneloop.tasks.rows.mixture.Mixture`), a
place still decides the lane.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import GOLDEN
from oneloop.data.order import EpochsAndIndices, Ordered, epoch_keys, permuted

_MAX_LANES = 64
_MIN_GROUPS = 8  # groups of a window if there are several lanes


class Windows(Ordered):
    """An endless seeded order over the samples of groups: position -> (epoch, index).

    Samples are numbered group by group. The order is a pure function of the position, like
    :class:`oneloop.data.order.Order`, and caches the last two epochs (one number per group).

    Args:
        sizes: samples of each group.
        seed: seed of the order.
        open_groups: groups of all open windows together, about. If that is every group, the order
            is a permutation of all samples.
        batch: places of a step.
        places: (n,), the place in the step of each sample, repeated endlessly; None: all places.
        period: steps until these places repeat.

    Raises:
        ValueError: there are no samples or no open groups.
    """

    def __init__(
        self,
        sizes: Sequence[int] | NDArray[np.int64],
        *,
        seed: int,
        open_groups: int,
        batch: int,
        places: NDArray[np.int64] | None = None,
        period: int = 1,
    ) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.seed = seed
        self.size = int(self.sizes.sum())
        if self.size < 1 or open_groups < 1:
            raise ValueError(
                f"an order requires samples and open groups, got {self.size} and {open_groups}"
            )
        self._firsts = np.cumsum(self.sizes) - self.sizes
        self.open_groups = open_groups

        if places is None:
            places = np.arange(batch)
        # As many lanes as divide the batch, leave large windows, and have a sample in each step.
        self.lanes = 1
        if open_groups < len(self.sizes):
            most = min(_MAX_LANES, open_groups // _MIN_GROUPS, len(places) // period)
            while most > 1 and batch % most:
                most -= 1
            self.lanes = max(1, most)
        self.window = min(open_groups, len(self.sizes)) // self.lanes  # groups of a window

        # The lane of each sample until the places repeat, how many samples of its lane are before
        # it, and how many each lane has.
        self._turns = places // (batch // self.lanes)
        self._before = np.empty_like(places)
        for lane in range(self.lanes):
            of_lane = self._turns == lane
            self._before[of_lane] = np.arange(np.count_nonzero(of_lane))
        self._each = np.bincount(self._turns, minlength=self.lanes)
        self._layout = lru_cache(maxsize=2)(self._new_layout)

    def at(self, positions: NDArray[np.int64]) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        flat = positions.reshape(-1)
        epochs, offsets = np.divmod(flat, self.size)
        indices = np.empty_like(flat)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            indices[of_epoch] = self._epoch_indices(epoch, offsets[of_epoch])
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)

    def _epoch_indices(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        layout = self._layout(epoch)

        # Find the lane of each offset and the sample's number in the epoch, lane after lane.
        rounds, within = np.divmod(offsets + layout.phase, len(self._turns))
        lane = self._turns[within]
        earlier = rounds * self._each[lane] + self._before[within] - layout.missing[lane]
        sample = layout.starts[lane] + earlier

        # Shuffle within the window.
        window = np.searchsorted(layout.edges, sample, side="right") - 1
        first = layout.edges[window]
        size = (layout.edges[window + 1] - first).astype(np.uint64)
        keys = layout.key + window.astype(np.uint64) * np.uint64(GOLDEN)
        within_window = (sample - first).astype(np.uint64)
        shuffled = permuted(within_window, size, keys)
        sample = first + shuffled.astype(np.int64)

        # Convert the number in shuffled groups to the number in groups as stored.
        slot = np.searchsorted(layout.ends, sample, side="right")
        group = layout.groups[slot]
        start = layout.ends[slot] - self.sizes[group]
        indices: NDArray[np.int64] = self._firsts[group] + sample - start
        return indices

    def _new_layout(self, epoch: int) -> "_Layout":
        """Return the groups of an epoch, in their order and cut into lanes and windows."""
        # Shuffle the groups.
        total = len(self.sizes)
        key = epoch_keys(np.array([epoch], dtype=np.int64), self.seed)[0]
        keys = np.full(total, key)
        groups = permuted(np.arange(total, dtype=np.uint64), total, keys).astype(np.int64)
        ends = np.cumsum(self.sizes[groups])

        # Divide the samples among the lanes. If the epoch begins within a step, its first round
        # continues the round of the previous epoch.
        phase = epoch * self.size % len(self._turns)
        missing = self._counts_by_lane(phase)
        counts = self._counts_by_lane(phase + self.size) - missing
        starts = np.cumsum(counts) - counts

        # Cut each lane into windows.
        edges: list[Any] = []
        for start, count in zip(starts, counts, strict=True):
            if count:
                edges.append(self._edges(ends, start, start + count))
        edges.append([self.size])
        return _Layout(
            groups=groups,
            ends=ends,
            starts=starts,
            missing=missing,
            edges=np.concatenate(edges),
            phase=phase,
            key=key,
        )

    def _counts_by_lane(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first ``samples`` samples each lane has."""
        rounds, rest = divmod(samples, len(self._turns))
        begun = np.bincount(self._turns[:rest], minlength=self.lanes)  # of the last round
        return np.asarray(rounds * self._each + begun)

    def _edges(self, ends: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
        """Return the first sample of each window of a lane."""
        inside = ends[(ends > start) & (ends < stop)]  # a group ends where the next one begins
        return np.concatenate([[start], inside[self.window - 1 :: self.window]])


@dataclass(frozen=True)
class _Layout:
    """The shuffled groups of one epoch, cut into lanes and windows.

    Sample numbers follow the shuffled groups.
    """

    groups: NDArray[np.int64]
    ends: NDArray[np.int64]  # end of each group
    starts: NDArray[np.int64]  # start of each lane
    # samples of the first round that the previous epoch took from each lane
    missing: NDArray[np.int64]
    edges: NDArray[np.int64]  # start of each window, and the end
    phase: int  # samples of the first round that belong to the previous epoch
    key: np.uint64
