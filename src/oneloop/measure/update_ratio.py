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
        self._parts = [as_real(local(parameter.detach())) for parameter in parameters]

        # An odd stride meets all columns of matrices, whose width is mostly even.
        total = sum(part.numel() for part in self._parts)
        self._stride = total // _SAMPLED | 1
        self._before: Tensor | None = None

        # The weights that each sampled weight represents.
        self._counts: list[Tensor] = []
        for part in self._parts:
            sample = self._sample(part)
            count = part.numel() / max(1, len(sample))
            self._counts.append(torch.full_like(sample, count, dtype=torch.float32))

    def before(self) -> None:
        """Store the current weights. Call it before the update."""
        if self._parts:
            self._before = self._weights()

    def _sample(self, part: Tensor) -> Tensor:
        return part.flatten()[:: self._stride]

    def _weights(self) -> Tensor:
        """Return the sampled weights, in float32 at least."""
        weights = torch.cat([self._sample(part) for part in self._parts])
        wide = torch.promote_types(weights.dtype, torch.float32)
        return weights.to(wide)

    def values(self, like: Tensor) -> Tensor:
        """Return the squared norms of the change since :meth:`before`, and of the weights then.

        The shape is (2,). They are 0 if :meth:`before` was not called, and on a rank without
        weights."""
        before = self._before
        if before is None:
            return like.new_zeros(2)
        self._before = None
        change = self._weights() - before
        squares = torch.stack([change, before]).square_()
        counts = torch.cat(self._counts)
        return squares.mv(counts.to(squares.dtype))
