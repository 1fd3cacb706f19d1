"""Evaluation metrics of pairs of answers: means over all pairs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oneloop.basics.wide_sums import WideSum, widest


class PairSums:
    """Means of values of each pair.

    Args:
        names: the values, and whether a larger mean is better (None: neither).
    """

    def __init__(self, names: Mapping[str, bool | None]) -> None:
        self.higher_is_better: dict[str, bool | None] = dict(names)
        self.names = list(names)
        self._sums = WideSum(len(self.names) + 1)
        """of each value, and of the pairs"""

    def to(self, device: torch.device) -> "PairSums":
        self._sums = self._sums.to(device)
        return self

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add pairs, without a host sync.

        Args:
            values: (pairs,), by name.
        """
        sums = []
        for name in self.names:
            value = widest(values[name])
            sums.append(value.sum())
        sums.append(torch.ones_like(value).sum())
        self._sums.add(torch.stack(sums))

    def sums(self) -> Sequence[Tensor]:
        return [self._sums.parts]

    def compute(self) -> dict[str, float]:
        *totals, pairs = self._sums.value().tolist()
        means = {}
        for name, total in zip(self.names, totals, strict=True):
            means[name] = total / pairs
        return means
