"""What the micro-batches of one step come to, on the device.

>>> sums = Sums(("accuracy",))
>>> sums.add(loss, {"accuracy": share_that_is_right}, weight=64.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Sums:
    """The summed loss, and the sums of named figures (0-dim outputs), each times the weight of its micro-batch.

    ``apart`` keeps the sums of each micro-batch, to be added in an order that no split changes.
    """

    def __init__(self, names: Sequence[str] = (), *, apart: bool = False) -> None:
        self._names, self._apart = names, apart
        self.loss: Any = 0.0
        """0-dim; apart (micro-batches,)"""
        self.figures: Tensor | None = None
        """one value for each name; apart (micro-batches, names)"""

    def add(self, loss: Tensor, outputs: Mapping[str, Tensor], weight: float) -> None:
        """Takes in one micro-batch; no host sync, and no work for the device beyond the sums.

        The mean of a figure that is missing in one of them is NaN.
        """
        if self._apart:
            self.loss = _with(self.loss, loss.detach())
        else:
            self.loss = self.loss + loss.detach()
        if self._names:
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            nothing = loss.detach().new_full((), torch.nan)
            mine = torch.stack([outputs.get(name, nothing).detach().to(wide) for name in self._names]) * weight
            if self._apart:
                self.figures = _with(self.figures, mine)
            else:
                self.figures = mine if self.figures is None else self.figures + mine


def _with(rows: Any, row: Tensor) -> Tensor:
    return torch.cat([rows, row[None]]) if torch.is_tensor(rows) else row[None]
