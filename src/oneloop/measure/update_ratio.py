"""The update ratio |change of the weights| / |weights|; about 1e-3 is common."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from oneloop.basics.tensors import as_real, local

# most weights to measure; of larger models a sample, which gives the ratio to about 1 %
_SAMPLED = 1 << 13
_RUN = 64  # adjacent weights that are sampled together: memory is read in cache lines


class UpdateRatio:
    """The ratio of the norms of update and weights.

    For models with more than some thousand weights it is estimated from a fixed sample, if possible
    the same share of each parameter. Each sampled weight counts for the weights of its parameter
    that it represents. The shards of a parameter are sampled separately.

    Args:
        parameters: Of the model; of sharded ones, this rank's shards.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parts = [_dense(as_real(local(parameter.detach()))) for parameter in parameters]
        number_of_weights = sum(part.numel() for part in parts)
        stride = max(1, number_of_weights // _SAMPLED)

        # Sample runs of adjacent weights; runs of one width are measured together.
        self._runs: defaultdict[int, list[Tensor]] = defaultdict(list)
        # the number of weights that each sampled weight represents
        self._counts: defaultdict[int, list[Tensor]] = defaultdict(list)
        for part in parts:
            size = part.numel()
            if size and part.is_contiguous():
                width = min(_RUN, size)
                whole = part.view(-1)[: size // width * width]
                runs = whole.view(-1, width)[::stride]
                self._runs[width].append(runs)
                number = runs.numel()
                counts = torch.full([number], size / number, device=part.device)
                self._counts[width].append(counts)
        self._before: dict[int, Tensor] = {}

    def before(self) -> None:
        """Store the current weights. Call it before the update."""
        self._before = self._sample()

    def _sample(self) -> dict[int, Tensor]:
        sample = {}
        for width, runs in self._runs.items():
            sample[width] = torch.cat(runs).flatten()
        return sample

    def values(self, like: Tensor) -> Tensor:
        """Return the squared norms of the change since :meth:`before`, and of the weights then.

        The shape is (2,). They are 0 if :meth:`before` was not called, and on a rank without
        weights."""
        total = like.new_zeros(2)
        now = self._sample() if self._before else {}
        for width, before in self._before.items():
            wide = torch.promote_types(before.dtype, torch.float32)
            old = before.to(wide)
            change = now[width].to(wide) - old
            squares = torch.stack([change, old]).square_()
            counts = torch.cat(self._counts[width]).to(wide)
            total = total + squares.mv(counts)
        self._before = {}
        return total


def _dense(tensor: Tensor) -> Tensor:
    """Permute the dimensions into memory order, which makes channels-last weights contiguous."""
    in_memory_order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(in_memory_order)
