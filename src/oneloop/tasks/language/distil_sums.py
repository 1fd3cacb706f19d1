"""Evaluation metrics of a student: those of texts, and its divergence from the teacher."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oneloop.basics.wide_sums import WideSum, widest
from oneloop.task_protocol.evaluation_metrics import TextSums


class DistilSums(TextSums):
    """Metrics of texts, and the mean divergence of their tokens.

    Args:
        by_bytes: whether the number of bytes of each token is known.
        whole: whether to count fully correct texts.
    """

    def __init__(self, *, by_bytes: bool, whole: bool) -> None:
        super().__init__(by_bytes=by_bytes, whole=whole)
        self.higher_is_better["divergence"] = False
        self._apart = WideSum(2)
        """nats, tokens"""

    def to(self, device: torch.device) -> "DistilSums":
        super().to(device)
        self._apart = self._apart.to(device)
        return self

    def add_divergence(self, nats: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch: the summed divergence, and the number of target tokens, 0-dim."""
        sums = [widest(nats), widest(tokens)]
        self._apart.add(torch.stack(sums))

    def sums(self) -> Sequence[Tensor]:
        return [*super().sums(), self._apart.parts]

    def compute(self) -> dict[str, float]:
        metrics = super().compute()
        nats, tokens = self._apart.value().tolist()
        metrics["divergence"] = nats / tokens
        return metrics
