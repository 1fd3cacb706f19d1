"""The update ratio |change of the weights| / |weights|; about 1e-3 is common."""

from collections.abc import Iterable

import torch
from torch import Tensor

from oneloop.basics.tensors import as_real, local

# most weights to measure; of larger models a sample, which gives the ratio to about 1 %
_SAMPLED = 1 << 13


class UpdateRatio:
    """The ratio of the norms of update and weights.

    For models with more than some thousand weights it is estimated from a fixed sample, the same
    share of each parameter. Each sampled weight counts for the weights of its parameter that it
    represents. The shards of a parameter are sampled separately.

    Args:
        parameters: Of the model; of sharded ones, this rank's shards.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parts = [_dense(as_real(local(parameter.detach()))) for parameter in parameters]

        # An odd stride meets all columns of matrices, whose width is mostly even.
        stride = (sum(part.numel() for part in parts) // _SAMPLED) | 1
        self._samples: list[Tensor] = []
        self._counts: list[Tensor] = []  # the weights that each sampled weight represents
        for part in parts:
            if part.numel() and part.is_contiguous():
                sample = part.view(-1)[::stride]
                counts = torch.full_like(sample, part.numel() / len(sample), dtype=torch.float32)
                self._samples.append(sample)
                self._counts.append(counts)
        self._before: Tensor | None = None

    def before(self) -> None:
        """Store the current weights. Call it before the update."""
        if self._samples:
            self._before = self._weights()

    def _weights(self) -> Tensor:
        """Return the sampled weights, in float32 at least."""
        weights = torch.cat(self._samples)
        return weights.to(torch.promote_types(weights.dtype, torch.float32))

    def values(self, like: Tensor) -> Tensor:
        """Return the squared norms of the change since :meth:`before`, and of the weights then.

        The shape is (2,). They are 0 if :meth:`before` was not called, and on a rank without
        weights."""
        before = self._before
        if before is None:
            return like.new_zeros(2)
        self._before = None
        squares = torch.stack([self._weights() - before, before]).square_()
        return squares.mv(torch.cat(self._counts).to(squares.dtype))


def _dense(tensor: Tensor) -> Tensor:
    """Permute the dimensions into memory order, which makes channels-last weights contiguous."""
    in_memory_order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(in_memory_order)
