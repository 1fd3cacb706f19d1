"""Metrics of the packaged tasks, with the states of a ``torchmetrics.Metric``.

They do not need the import of torchmetrics, which takes as long as that of the whole loop.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.wide_sums import on_host, widest


class LightMetric(nn.Module):
    """Base class of metrics, whose ``compute`` returns values by name.

    Their states are integer counts, which are summed over the ranks, and lists of tensors, which
    are joined in the order of the data.

    Args:
        higher_is_better: whether a larger value is better, by name (None: unknown).
    """

    def __init__(self, higher_is_better: dict[str, bool | None]) -> None:
        super().__init__()
        self.higher_is_better = higher_is_better
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}

    def add_counts(self, name: str, *shape: int) -> None:
        """Add integer counts of this shape as an attribute."""
        self._defaults[name] = torch.zeros(shape, dtype=torch.int64)
        self._reductions[name] = dim_zero_sum
        self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))

    def add_list(self, name: str) -> None:
        """Add an empty list as an attribute."""
        self._defaults[name] = []
        self._reductions[name] = None
        setattr(self, name, [])


def dim_zero_sum(states: Tensor) -> Tensor:
    """Return the sum over the ranks; has the name of torchmetrics' function."""
    return states.sum(0)


class RowSums(LightMetric):
    """Base class of metrics that are computed from sums.

    ``rows`` has the sums of each micro-batch, so that the total is the same on any number of ranks,
    and is rounded only once.

    Args:
        higher_is_better: see :class:`LightMetric`.
    """

    rows: list[Tensor]

    def __init__(self, higher_is_better: dict[str, bool | None]) -> None:
        super().__init__(higher_is_better)
        self.add_list("rows")

    def add(self, sums: Iterable[Tensor]) -> None:
        """Add the sums of a micro-batch, 0-dim, always as many. No host sync."""
        self.rows.append(torch.stack([*map(widest, sums)]))

    def totals(self) -> list[float]:
        """Return the sums of all micro-batches. Host sync."""
        # It imports torch's sharding and accelerate, which --help and wrong keys do not need.
        from oneloop.basics.exact_sums import rounded_sum

        columns = on_host(torch.stack(self.rows)).T.tolist()
        return [*map(rounded_sum, columns)]
