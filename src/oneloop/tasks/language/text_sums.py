"""Metrics of texts: perplexity, accuracy, bits per byte, and fully correct texts."""

import math

import torch
from torch import Tensor

from oneloop.tasks.light_metrics import RowSums


class TextSums(RowSums):
    """Perplexity and accuracy per token, bits per byte, and the share of fully correct texts.

    Args:
        by_bytes: whether the number of bytes of each token is known.
        whole: whether to count fully correct texts (``exact``).
        teacher: whether to average the divergence from a teacher (``divergence``).
    """

    def __init__(
        self, *, by_bytes: bool = True, whole: bool = False, teacher: bool = False
    ) -> None:
        better: dict[str, bool | None] = {"perplexity": False, "accuracy": True}
        if by_bytes:
            better["bits_per_byte"] = False
        if whole:
            better["exact"] = True
        if teacher:
            better["divergence"] = False
        super().__init__(better)

    def update(
        self,
        nats: Tensor,
        tokens: Tensor,
        *,
        right: Tensor,
        text: Tensor | None = None,
        whole: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> None:
        """Add the sums of a micro-batch, without a host sync.

        Args:
            nats: summed loss, 0-dim.
            tokens: number of target tokens, 0-dim.
            right: number of target tokens with the largest logit, 0-dim.
            text: number of bytes of the target tokens, 0-dim.
            whole: (texts,), whether all target tokens of a text are correct.
            divergence: summed divergence from the teacher, 0-dim.
        """
        zero = torch.zeros_like(tokens)
        texts = (zero, zero) if whole is None else (zero + len(whole), whole.sum())
        optional = [zero if one is None else one for one in (text, divergence)]
        self.add([nats, tokens, right, *texts, *optional])

    def compute(self) -> dict[str, float]:
        nats, tokens, right, texts, whole, text, divergence = self.totals()
        values = {
            "perplexity": math.exp(min(nats / tokens, 700.0)),  # exp(710) overflows
            "accuracy": right / tokens,
            "bits_per_byte": _ratio(nats / math.log(2), text),
            "exact": _ratio(whole, texts),
            "divergence": divergence / tokens,
        }
        return {name: values[name] for name in self.higher_is_better}


def _ratio(part: float, whole: float) -> float:
    if not whole:
        return math.nan
    return part / whole
