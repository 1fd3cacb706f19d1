"""A stateless mixture of data sets, on any number of processes.

Every prefix has the shares within one sample.

>>> mixture = Mixture({"code": code, "books": books}, weights=[0.7, 0.3])
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import EpochsAndIndices, Ordered, order_of
from oneloop.tasks.rows.network_traffic import Traffic
from oneloop.tasks.rows.row_group_order import Windows

_MAX_CYCLE = 100_000  # positions; the largest cycle of set numbers
_MAX_REPEATS = 1 << 20  # samples; a table of the places of a step has as many entries


class Mixture:
    """A map-style data set of several concatenated sets.

    Its :meth:`order` draws from them by weight.
    An epoch has as many samples as all sets together.

    Args:
        sets: the data sets by name.
        weights: sampling weight of each set, in any unit.

    Raises:
        ValueError: a set is empty, or the weights are invalid.
    """

    def __init__(self, sets: Mapping[str, Any], weights: Sequence[float]) -> None:
        for name, dataset in sets.items():
            if not len(dataset):
                raise ValueError(f"the set {name!r} of a mixture is empty; remove it")
        self.sets = dict(sets)
        self.weights = list(weights)
        self.cycle = proportions(weights)
        # first index of each set, and the total length
        self.bounds = np.cumsum([0, *map(len, self.sets.values())])

    @property
    def sources(self) -> dict[str, range]:
        """Return the range of sample indices of each set, by name."""
        bounds = self.bounds.tolist()
        ranges = map(range, bounds, bounds[1:])
        return dict(zip(self.sets, ranges, strict=True))

    @property
    def skips(self) -> bool:
        """Return whether a set leaves out samples by raising SkipSample."""
        return any(getattr(one, "skips", False) for one in self.sets.values())

    @property
    def traffic(self) -> Traffic | None:
        """Return what a sample takes from the network: the mean of the sets by their weights."""
        of_sets = [getattr(dataset, "traffic", None) for dataset in self.sets.values()]
        if not any(of_sets):
            return None
        means = np.average([one or (0, 0) for one in of_sets], axis=0, weights=self.weights)
        return Traffic(*means.tolist())

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: int) -> Any:
        _, dataset, first = self._set_of(index)
        return dataset[int(index - first)]

    def _set_of(self, index: int) -> tuple[str, Any, int]:
        """Return the set of a sample: its name, the set, and the index of its first sample."""
        which = int(np.searchsorted(self.bounds, index, side="right")) - 1
        name, dataset = list(self.sets.items())[which]
        return name, dataset, int(self.bounds[which])

    def near(self, index: int) -> range:
        """Return the indices that are cheap to read after this one.

        These are the indices of the same row group, or of the same set.
        """
        _, dataset, first = self._set_of(index)
        local = dataset.near(index - first) if hasattr(dataset, "near") else range(len(dataset))
        return range(first + local.start, first + local.stop)

    def announce(self, order: Ordered, layout: BatchLayout, **where: int) -> list[Any]:
        """Return the plans of the sets, which know the order of the mixture; see Parquet."""
        plans = []
        for dataset, first in zip(self.sets.values(), self.bounds, strict=False):
            if hasattr(dataset, "announce"):
                plans += dataset.announce(order, layout, **where, first=int(first))
        return plans

    def waits(self) -> str:
        """Return what a data set waits for, and why; empty if none waits long."""
        sets = [dataset for dataset in self.sets.values() if hasattr(dataset, "waits")]
        return max((dataset.waits() for dataset in sets), default="")

    def where(self, index: int) -> str:
        """Return the source of a sample for messages: file and row, or set and index."""
        name, dataset, first = self._set_of(index)
        local = int(index - first)
        return str(dataset.where(local)) if hasattr(dataset, "where") else f"{name}, sample {local}"

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return the order of samples, a function of seed and position.

        ``batch`` affects only sets in row groups
        (:class:`oneloop.tasks.rows.row_group_order.Windows`): the place of a sample in the step
        decides its lane. A rank, whose share of a step is consecutive places, therefore reads only
        some lanes of each set. Two cases have one lane, so that each rank reads all groups: a set
        with one sample per step or fewer, and all sets if cycle and steps coincide only after more
        than a million samples.
        """
        repeats = math.lcm(len(self.cycle), batch)  # samples until cycle and steps coincide
        orders = []
        for number, dataset in enumerate(self.sets.values()):
            order = order_of(dataset, seed=seed, batch=1, shuffle=shuffle)
            if isinstance(order, Windows) and repeats <= _MAX_REPEATS:
                of_set = np.tile(self.cycle == number, repeats // len(self.cycle))
                places = np.flatnonzero(of_set) % batch
                order = Windows(
                    order.sizes,
                    seed=seed,
                    open_groups=order.open_groups,
                    batch=batch,
                    places=places,
                    period=repeats // batch,
                )
            orders.append(order)
        return Mixed(orders, self.bounds[:-1], self.cycle)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint of the sets; None if one of them has none."""
        described = {}
        for name, dataset in self.sets.items():
            described[name] = getattr(dataset, "fingerprint", lambda: None)()
        if None in described.values():
            return None
        return {
            "length": len(self),
            "weights": self.weights,
            "order": list(described),
            "sets": described,
        }

    def about(self) -> str:
        """Return the share and size of each set for the log."""
        total = sum(self.weights)
        shares = []
        for (name, dataset), weight in zip(self.sets.items(), self.weights, strict=True):
            shares.append(f"{name} {weight / total:.1%} ({len(dataset):,} samples)")
        return f"mixture: {', '.join(shares)}"


class Mixed(Ordered):
    """An endless order over several sets: position -> (epoch of its set, index).

    Args:
        orders: the order of each set.
        offsets: index of the first sample of each set.
        cycle: the set number at each position, repeated endlessly, as :func:`proportions` returns
            it.
    """

    def __init__(
        self, orders: Sequence[Ordered], offsets: NDArray[np.int64], cycle: NDArray[np.int64]
    ) -> None:
        self.orders = orders
        self._offsets = offsets
        self._cycle = cycle

        # For each set, how often it occurs in the cycle. For each position of the cycle, how often
        # its set occurs before it.
        is_set = cycle[:, None] == np.arange(len(orders))[None, :]
        earlier = np.cumsum(is_set, axis=0) - is_set
        self._each = is_set.sum(0)
        self._before = earlier[np.arange(len(cycle)), cycle]

    def at(self, positions: NDArray[np.int64]) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        cycles, offsets = np.divmod(positions.reshape(-1), len(self._cycle))
        which = self._cycle[offsets]
        # position within its set's order
        local = cycles * self._each[which] + self._before[offsets]
        epochs = np.empty_like(local)
        indices = np.empty_like(local)
        for number, order in enumerate(self.orders):
            of_set = which == number
            if of_set.any():
                epochs[of_set], indices[of_set] = order.at(local[of_set])
                indices[of_set] += self._offsets[number]
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)


def proportions(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return a cycle of set numbers with these proportions.

    In every prefix, each set's count is its share, rounded down or up. Candidates are the sets
    whose count is below their share of the prefix, rounded up. The candidate whose next sample is
    due first is chosen. Such a cycle always exists (Still 1979; Tijdeman 1980). Its length is the
    least common denominator of the shares.

    Raises:
        ValueError: a weight is negative or not a number, all are 0, or the cycle would be too long.
    """
    described = ", ".join(map(str, weights))
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights):
        raise ValueError(
            f"the weights of a mixture are {described}; expected numbers above 0 (0 drops a set)"
        )

    # Convert the decimal text, not the binary number: 0.1 is 1/10.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length > _MAX_CYCLE:
        raise ValueError(
            f"the weights of a mixture are {described}, shares of {length:,}; round them to "
            "four digits"
        )

    each = np.array([int(share * length) for share in shares])  # samples of each set in the cycle
    counts = np.zeros_like(each)  # samples of each set so far
    cycle = np.zeros(length, dtype=np.int64)
    for position in range(length):
        # Positions by which the next sample of each set must come; ties go by number.
        due = -(-(counts + 1) * length // np.maximum(each, 1))
        is_candidate = counts * length < each * (position + 1)
        chosen = np.where(is_candidate, due, np.inf).argmin()
        cycle[position] = chosen
        counts[chosen] += 1
    return cycle
