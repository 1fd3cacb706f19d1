"""Metrics of the packaged tasks, with the states of a ``torchmetrics.Metric``.

They do not need the import of torchmetrics, which takes as long as that of the whole loop.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.wide_sums import on_host, widest


class Means(nn.Module):
    """Weighted means by name.

    ``rows`` has the sums of each micro-batch, joined in the order of the data, so that a mean is
    the same on any number of ranks, and is rounded only once.

    Args:
        higher_is_better: the means, and whether a larger value is better (None: unknown).
    """

    rows: list[Tensor]

    def __init__(self, higher_is_better: Mapping[str, bool | None]) -> None:
        super().__init__()
        self.higher_is_better = dict(higher_is_better)
        self.names = list(higher_is_better)
        """names of the means; a subclass may compute other values from them"""
        self.rows = []
        self._defaults: dict[str, Any] = {"rows": []}
        self._reductions: dict[str, Any] = {"rows": None}

    def add_counts(self, name: str, *shape: int) -> None:
        """Add integer counts of this shape as an attribute; they are summed over the ranks."""
        zeros = torch.zeros(shape, dtype=torch.int64)
        self._defaults[name] = zeros
        self._reductions[name] = dim_zero_sum
        self.register_buffer(name, zeros.clone())

    def update(self, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a micro-batch, without a host sync.

        Args:
            values: for each mean its values, already weighted, and the weights; of any shape.
        """
        sums = []
        for name in self.names:
            sums += [widest(tensor).sum() for tensor in values[name]]
        self.rows.append(torch.stack(sums))

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return the sums of all values and of all weights, by name. Host sync."""
        # It imports torch's sharding and accelerate, which --help and wrong keys do not need.
        from oneloop.basics.exact_sums import rounded_sum

        columns = on_host(torch.stack(self.rows)).T.tolist()
        totals = [*map(rounded_sum, columns)]

        # Each name has two columns: its values and its weights.
        values, weights = totals[::2], totals[1::2]
        pairs = zip(values, weights, strict=True)
        return dict(zip(self.names, pairs, strict=True))

    def compute(self) -> dict[str, Any]:
        """Return the means by name; NaN without weight."""
        means = {}
        for name, (total, weight) in self.totals().items():
            means[name] = total / weight if weight else math.nan
        return means


class TextMeans(Means):
    """Means of texts: of ``perplexity`` the nats per token, of ``bits_per_byte`` those per byte."""

    def compute(self) -> dict[str, Any]:
        values = super().compute()
        values["perplexity"] = math.exp(min(values["perplexity"], 700.0))  # exp(710) overflows
        nats, size = self.totals().get("bits_per_byte", (0, 0))
        if size:
            values["bits_per_byte"] = nats / math.log(2) / size
        return values


def dim_zero_sum(states: Tensor) -> Tensor:
    """Return the sum over the ranks; has the name of torchmetrics' function."""
    return states.sum(0)
