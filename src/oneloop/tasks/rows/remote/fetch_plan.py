"""Which row groups a rank needs next: computed from the order of samples, without any reading."""

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered

_POSITIONS = 4096  # positions of the order that are computed at once, about
_BLOCKS = 16  # such computations in one call, at most
_FARTHEST = 1 << 22  # positions ahead; a rare set of a mixture is not looked for beyond them


class NeededGroups:
    """The row groups that one rank needs from a step on, as far as ``budget`` bytes reach.

    >>> steps = needed.advance(step)

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
        self._full = False  # whether the next group does not fit into the budget
        # First and last known step of each use of a group in an epoch. Between two epochs the group
        # may be dropped.
        self._uses: dict[tuple[int, int], tuple[int, int]] = {}

    def advance(self, step: int) -> dict[int, int]:
        """Return the step of the next use of each group that is needed, in this order.

        Of a group in use, it is a step that has passed.

        Args:
            step: number of the first step whose samples were not read yet, from 0 on; not before
                that of the last call.
        """
        ended = [use for use, (_, last) in self._uses.items() if last < step]
        for use in ended:
            del self._uses[use]
        if not self._full or ended or step >= self._seen:
            self._full = False
            for _ in range(_BLOCKS):
                if self.complete(step):
                    break
                self._look(step)

        next_use: dict[int, int] = {}
        for (group, _), (first, _) in self._uses.items():
            next_use[group] = min(first, next_use.get(group, first))
        return dict(sorted(next_use.items(), key=itemgetter(1)))

    def complete(self, step: int) -> bool:
        """Return whether the groups from this step on fill the budget, or are all groups."""
        known = {group for group, _ in self._uses}
        if self._full or len(known) == self._groups:
            return True
        return (self._seen - step) * self._step_size > _FARTHEST

    def _look(self, step: int) -> None:
        """Look at the next block of steps; stop before a group that the budget does not allow."""
        self._seen = max(self._seen, step)
        steps = np.arange(self._seen, self._seen + self._block)
        positions = self._start + steps[:, None] * self._step_size + self._share
        epochs, indices = self._order.at(positions.astype(np.int64))

        # Leave out the samples of other sets of a mixture; find the group of each sample.
        inside = (indices >= self._firsts[0]) & (indices < self._firsts[-1])
        row_steps = np.broadcast_to(steps[:, None], indices.shape)[inside]
        groups = np.searchsorted(self._firsts, indices[inside], side="right") - 1

        # Find the step at which the budget is used up. The current step is always needed.
        end = self._end(groups, row_steps, int(steps[-1]) + 1)
        self._full = end <= steps[-1]
        end = max(end, step + 1)
        self._seen = max(self._seen, end)
        keep = row_steps < end

        # Find the first and the last step of each use.
        columns = []
        for part in (groups, epochs[inside], row_steps):
            columns.append(part[keep].tolist())
        for group, epoch, at in zip(*columns, strict=True):
            first, _ = self._uses.get((group, epoch), (at, at))
            self._uses[group, epoch] = first, at

    def _end(self, groups: NDArray[np.int64], steps: NDArray[np.int64], end: int) -> int:
        """Return the step of the first group that does not fit into the budget, or ``end``.

        Args:
            groups: of each sample, in order of the steps.
            steps: of each sample.
            end: after the last step.
        """
        known = {group for group, _ in self._uses}
        held = sum(int(self._sizes[group]) for group in known)
        used, first = np.unique(groups, return_index=True)
        for at in np.argsort(first, kind="stable").tolist():
            group = int(used[at])
            if group in known:
                continue
            held += int(self._sizes[group])
            if held > self._budget:
                return int(steps[first[at]])
        return end
