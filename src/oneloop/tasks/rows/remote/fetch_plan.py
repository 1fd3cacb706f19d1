"""Which row groups a rank needs next: computed from the order of samples, without any reading."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered

_POSITIONS = 4096  # positions of the order that are computed at once, about
_BLOCKS = 16  # such computations in one call, at most
_FARTHEST = 1 << 22  # positions ahead; a rare set of a mixture is not looked for beyond them


class NeededGroups:
    """The row groups that one rank needs from a step on, as far as ``budget`` bytes reach.

    >>> added, removed = needed.advance(step)

    Args:
        order: the order of samples of the training set.
        layout: how a step is divided.
        rank: of the process.
        start: position of the first step, in samples.
        firsts: index of each group's first row in the training set, and of the last group's end.
        sizes: bytes of each group in memory.
        budget: bytes.
    """

    def __init__(
        self,
        order: Ordered,
        layout: BatchLayout,
        *,
        rank: int,
        start: int,
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64] | Sequence[int],
        budget: int,
    ) -> None:
        self._order = order
        self._step_size = layout.size
        self._start = start
        self._share = layout.offsets(rank)
        self._block = max(1, _POSITIONS // len(self._share))  # steps
        self._firsts = firsts
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._groups = int(np.count_nonzero(np.diff(firsts)))  # groups that have selected rows
        self._budget = budget

        self._seen = 0  # steps that were looked at
        self._held = 0  # bytes of the needed groups
        # step of the first and of the last known use of each needed group
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def advance(self, step: int) -> tuple[dict[int, int], set[int]]:
        """Begin at a step that is not before the last one.

        Args:
            step: number of the first step whose samples were not read yet, from 0 on.

        Returns:
            The groups that are needed since this call, with the step of their first use, in this
            order; and those that are not needed any more.
        """
        before = set(self._first)
        for group in [group for group, last in self._last.items() if last < step]:
            del self._first[group], self._last[group]
            self._held -= int(self._sizes[group])

        self._seen = max(self._seen, step)
        for _ in range(_BLOCKS):
            # Know this step's groups in any case.
            if self._seen > step and self.complete(step):
                break
            self._look()
        added = {group: first for group, first in self._first.items() if group not in before}
        return added, before - self._first.keys()

    def complete(self, step: int) -> bool:
        """Return whether the groups from this step on fill the budget, or are all groups."""
        if self._held >= self._budget or len(self._first) == self._groups:
            return True
        return (self._seen - step) * self._step_size > _FARTHEST

    def _look(self) -> None:
        """Look at the next block of steps."""
        steps = np.arange(self._seen, self._seen + self._block)
        positions = self._start + steps[:, None] * self._step_size + self._share
        _, indices = self._order.at(positions.astype(np.int64))
        self._seen += self._block

        # Leave out the samples of other sets of a mixture; find the group of each sample.
        inside = (indices >= self._firsts[0]) & (indices < self._firsts[-1])
        row_steps = np.broadcast_to(steps[:, None], indices.shape)[inside]
        groups = np.searchsorted(self._firsts, indices[inside], side="right") - 1

        # Find the first and the last step of each group.
        used, first = np.unique(groups, return_index=True)
        _, from_end = np.unique(groups[::-1], return_index=True)
        last = row_steps[len(groups) - 1 - from_end]
        for at in np.argsort(first, kind="stable").tolist():
            group = int(used[at])
            if group not in self._first:
                self._first[group] = int(row_steps[first[at]])
                self._held += int(self._sizes[group])
            self._last[group] = int(last[at])
