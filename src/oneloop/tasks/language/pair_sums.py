"""Evaluation metrics of pairs of answers: means over all pairs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from oneloop.basics.wide_sums import widest
from oneloop.tasks.light_metrics import RowSums


class PairSums(RowSums):
    """Means of values of each pair.

    Args:
        names: the values, and whether a larger mean is better (None: neither).
    """

    def __init__(self, names: Mapping[str, bool | None]) -> None:
        super().__init__(dict(names))
        self.names = list(names)

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add pairs, without a host sync.

        Args:
            values: (pairs,), by name.
        """
        columns = [widest(values[name]) for name in self.names]
        columns.append(torch.ones_like(columns[0]))
        self.add([column.sum() for column in columns])

    def compute(self) -> dict[str, float]:
        *totals, pairs = self.totals()
        means = {}
        for name, total in zip(self.names, totals, strict=True):
            means[name] = total / pairs
        return means
