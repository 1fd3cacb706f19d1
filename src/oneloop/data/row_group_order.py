"""The order of samples that lie in groups which are read whole, such as the row groups of parquet files.

A full permutation would read a group anew for nearly every sample. Here each epoch puts the groups into a new order,
cuts it into windows of a few groups, and permutes the samples within each window, which may be read once and dropped.

So that several processes need not all read the same window, the epoch is dealt out to lanes: each lane walks through
windows of its own, and the samples of a step come from all lanes in turn, in runs. A rank's share of a step is some of
the runs, so it reads its own lanes only. How many lanes there are depends on data and batch, never on the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.seeds import GOLDEN
from oneloop.data.order import Places, epoch_keys, permuted, positions_of

_MOST_LANES = 64
_FEWEST_GROUPS = 8  # of a window, where there are several lanes


class Windows:
    """Endless seeded order over the samples of some groups: position -> (epoch, index).

    Samples are numbered group by group. A pure function of the position, as :class:`oneloop.data.order.Order`; the last
    two epochs are kept (one number per group). All open windows together hold about ``open_groups`` groups; if these
    are all, the order is a permutation of all samples. ``batch`` is in samples. Raises ValueError without samples or
    open groups.
    """

    def __init__(self, sizes: Sequence[int] | NDArray[np.int64], *, seed: int, open_groups: int, batch: int) -> None:
        self.sizes, self.seed = np.asarray(sizes, dtype=np.int64), seed
        self.size = int(self.sizes.sum())
        if self.size < 1 or open_groups < 1:
            raise ValueError(f"an order needs a sample and an open group, got {self.size} and {open_groups}")
        self._firsts = np.cumsum(self.sizes) - self.sizes
        one = open_groups >= len(self.sizes)
        self.lanes = 1 if one else lanes(open_groups, batch)
        self.window = len(self.sizes) if one else open_groups // self.lanes  # groups of a window
        self.run = batch // self.lanes  # samples that come from one lane, one after another
        self._layouts: dict[int, _Layout] = {}

    def __getitem__(self, window: slice) -> Places:
        return self.at(positions_of(window))

    def at(self, positions: NDArray[np.int64]) -> Places:
        """Epochs and sample indices of these positions, each of the shape of ``positions``."""
        flat = positions.reshape(-1)
        epochs, indices = flat // self.size, np.empty_like(flat)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._of_epoch(epoch, flat[here] - epoch * self.size)
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)

    def _of_epoch(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        layout = self._layout(epoch)
        rounds, within = np.divmod(places + layout.phase, self.lanes * self.run)
        lane, offset = np.divmod(within, self.run)
        at = layout.starts[lane] + rounds * self.run + offset - layout.missing[lane]  # in the row of all groups
        window = np.searchsorted(layout.edges, at, side="right") - 1
        first = layout.edges[window]
        wide = (layout.edges[window + 1] - first).astype(np.uint64)
        keys = layout.key + window.astype(np.uint64) * np.uint64(GOLDEN)
        at = first + permuted((at - first).astype(np.uint64), wide, keys).astype(np.int64)
        place = np.searchsorted(layout.ends, at, side="right")
        group = layout.groups[place]
        indices: NDArray[np.int64] = self._firsts[group] + at - (layout.ends[place] - self.sizes[group])
        return indices

    def _layout(self, epoch: int) -> "_Layout":
        if epoch not in self._layouts:
            for old in [*self._layouts][:-1]:
                del self._layouts[old]
            self._layouts[epoch] = self._laid_out(epoch)
        return self._layouts[epoch]

    def _laid_out(self, epoch: int) -> "_Layout":
        number = len(self.sizes)
        key = epoch_keys(np.array([epoch], dtype=np.int64), self.seed)[0]
        groups = permuted(np.arange(number, dtype=np.uint64), number, np.full(number, key)).astype(np.int64)
        ends = np.cumsum(self.sizes[groups])
        # The epoch may begin within a step: the first round goes on where the step before it stopped.
        phase = epoch * self.size % (self.lanes * self.run)
        missing = self._of_lanes(phase)
        dealt = self._of_lanes(phase + self.size) - missing
        starts = np.cumsum(dealt) - dealt
        edges = [self._edges(ends, start, start + count) for start, count in zip(starts, dealt, strict=True) if count]
        return _Layout(groups, ends, starts, missing, np.concatenate([*edges, [self.size]]), phase, key)

    def _of_lanes(self, places: int) -> NDArray[np.int64]:
        """How many of the first so many places each lane has."""
        rounds, rest = divmod(places, self.lanes * self.run)
        return rounds * self.run + np.clip(rest - self.run * np.arange(self.lanes), 0, self.run)

    def _edges(self, ends: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
        """Where the windows of a lane begin, in the row of all groups."""
        inside = ends[(ends > start) & (ends < stop)]  # ends of groups, which are begins of others
        return np.concatenate([[start], inside[self.window - 1 :: self.window]])


@dataclass(frozen=True)
class _Layout:
    """One epoch: the groups in their order, cut into lanes and windows."""

    groups: NDArray[np.int64]
    ends: NDArray[np.int64]  # of each group, in the row of all groups
    starts: NDArray[np.int64]  # of each lane, in that row
    missing: NDArray[np.int64]  # samples of the first round that each lane gave to the epoch before
    edges: NDArray[np.int64]  # where the windows begin, and the end
    phase: int
    key: np.uint64


def lanes(open_groups: int, batch: int) -> int:
    """The most lanes that divide the batch, with at least eight groups in each one's window."""
    most = max(1, min(_MOST_LANES, open_groups // _FEWEST_GROUPS, batch))
    return max(number for number in range(1, most + 1) if batch % number == 0)
