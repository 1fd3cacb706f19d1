"""Several sets in proportion, at every prefix to one sample, for any number of processes and without a state.

>>> mixture = Mixture({"code": code, "books": books}, weights=[0.7, 0.3])
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.order import Ordered, Places, order_of, positions_of

_LONGEST = 100_000  # positions after which the row of sets repeats, at most


class Mixture:
    """Map-style: the samples of all sets, one set after another; drawn in proportion by its :meth:`order`.

    Args:
        sets: by name.
        weights: of the sets in training, in any unit. An epoch has as many samples as all sets together.

    Raises:
        ValueError: a set is empty, or the weights say nothing.
    """

    def __init__(self, sets: Mapping[str, Any], weights: Sequence[float]) -> None:
        for name, dataset in sets.items():
            if not len(dataset):
                raise ValueError(f"the set {name!r} of a mixture is empty; remove it")
        self.sets, self.weights = dict(sets), list(weights)
        self.row = proportions(weights)
        self.bounds = np.cumsum([0, *map(len, self.sets.values())])
        """where each set begins, and the end"""

    @property
    def sources(self) -> dict[str, range]:
        """The indices of each set's samples, by its name."""
        return {name: range(*self.bounds[i : i + 2].tolist()) for i, name in enumerate(self.sets)}

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: int) -> Any:
        which = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return [*self.sets.values()][which][int(index - self.bounds[which])]

    def near(self, index: int) -> range:
        """Samples of the same set that are read as cheaply once this one is."""
        which = int(np.searchsorted(self.bounds, index, side="right")) - 1
        dataset, first = [*self.sets.values()][which], int(self.bounds[which])
        own = dataset.near(index - first) if hasattr(dataset, "near") else range(len(dataset))
        return range(first + own.start, first + own.stop)

    def where(self, index: int) -> str:
        """The place of a sample, for a person."""
        which = int(np.searchsorted(self.bounds, index, side="right")) - 1
        name, dataset = [*self.sets.items()][which]
        own = int(index - self.bounds[which])
        return dataset.where(own) if hasattr(dataset, "where") else f"{name}, sample {own}"

    def order(self, *, seed: int, batch: int) -> Ordered:
        """Which sample stands at a position."""
        orders = [order_of(dataset, seed=seed, batch=1) for dataset in self.sets.values()]
        return Mixed(orders, self.bounds[:-1], self.row)

    def fingerprint(self) -> dict[str, Any] | None:
        """What the sets are; None where one of them does not tell."""
        described = {name: s.fingerprint() if hasattr(s, "fingerprint") else None for name, s in self.sets.items()}
        if None in described.values():
            return None
        return {"length": len(self), "weights": self.weights, "order": list(described), "sets": described}

    def about(self) -> str:
        """The shares, for a person."""
        total = sum(self.weights)
        return "mixture: " + ", ".join(
            f"{name} {weight / total:.1%} ({len(dataset):,} samples)"
            for (name, dataset), weight in zip(self.sets.items(), self.weights, strict=True)
        )


class Mixed:
    """Endless order over several sets: position -> (epoch of its set, index).

    Args:
        orders: of each set.
        firsts: what to add to each set's indices.
        row: which set stands at each position, over and over, as :func:`proportions` returns it.
    """

    def __init__(self, orders: Sequence[Ordered], firsts: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        self.orders, self._firsts, self._row = orders, firsts, row
        each = row[:, None] == np.arange(len(orders))[None, :]
        self._each = each.sum(0)
        self._before = (np.cumsum(each, axis=0) - each)[np.arange(len(row)), row]
        """how often a position's set stood in the row before"""

    def __getitem__(self, window: slice) -> Places:
        return self.at(positions_of(window))

    def at(self, positions: NDArray[np.int64]) -> Places:
        turns, places = np.divmod(positions.reshape(-1), len(self._row))
        which = self._row[places]
        own = turns * self._each[which] + self._before[places]  # positions in the set's own order
        epochs, indices = np.empty_like(own), np.empty_like(own)
        for number, order in enumerate(self.orders):
            mine = which == number
            if mine.any():
                epochs[mine], indices[mine] = order.at(own[mine])
                indices[mine] += self._firsts[number]
        return epochs.reshape(positions.shape), indices.reshape(positions.shape)


def proportions(weights: Sequence[float]) -> NDArray[np.int64]:
    """A row of set numbers that, repeated, holds each set's share at every prefix: rounded down or up, never further.

    Of the sets that may come (their count is below their share of the prefix, rounded up) the one comes whose next
    sample is due first; such a row always exists (Still 1979; Tijdeman 1980), and its length is the least common
    denominator of the weights.

    Raises:
        ValueError: a weight is negative or no number, all are 0, or they are too fine.
    """
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights):
        described = ", ".join(map(str, weights))
        raise ValueError(f"the weights of a mixture are {described}; expected numbers above 0 (0 drops a set)")
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length > _LONGEST:
        described = ", ".join(map(str, weights))
        raise ValueError(f"the weights of a mixture are {described}, shares of {length:,}; round them to four digits")
    each = [int(share * length) for share in shares]
    row, counts = np.zeros(length, dtype=np.int64), [0] * len(weights)
    for place in range(length):
        may = [i for i, count in enumerate(counts) if count * length < each[i] * (place + 1)]
        chosen = min(may, key=lambda i: (-(-(counts[i] + 1) * length // each[i]), i))
        row[place] = chosen
        counts[chosen] += 1
    return row
