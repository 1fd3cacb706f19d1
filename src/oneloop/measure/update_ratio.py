"""The update ratio |change of the weights| / |weights|; about 1e-3 is common."""

from collections.abc import Iterable, Sequence
from functools import reduce

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
        mine = [_dense(as_real(local(parameter.detach()))) for parameter in parameters]
        number_of_weights = sum(part.numel() for part in mine)
        stride = max(1, number_of_weights // _SAMPLED)

        # Sample runs of adjacent weights; runs of one width are measured together.
        by_width: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for part in mine:
            size = part.numel()
            if size and part.is_contiguous():
                width = min(_RUN, size)
                whole = part.view(-1)[: size // width * width]
                runs = whole.view(-1, width)[::stride]
                number = runs.numel()
                share = size / number
                counts = torch.full((number,), share, device=part.device)
                all_runs, all_counts = by_width.setdefault(width, ([], []))
                all_runs.append(runs)
                all_counts.append(counts)
        self._samples = [_Sample(runs, counts) for runs, counts in by_width.values()]
        self._begun = False

    def before(self) -> None:
        """Store the current weights. Call it before the update."""
        for sample in self._samples:
            sample.take(1)
        self._begun = True

    def values(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared norms of the change since :meth:`before`, and of the weights then.

        Both are 0-dim. They are 0 if :meth:`before` was not called, and on a rank without
        weights."""
        if self._begun and self._samples:
            squares = [sample.squares() for sample in self._samples]
            moved, size = reduce(torch.add, squares)
        else:
            moved, size = like.new_zeros(2)
        self._begun = False
        return moved, size

    @staticmethod
    def ratio(ranks: Sequence[Sequence[float]]) -> float | None:
        """Return the ratio from the :meth:`values` of all ranks; None if nothing was measured."""
        moved = sum(values[0] for values in ranks)
        size = sum(values[1] for values in ranks)
        return (moved / size) ** 0.5 if size else None


def _dense(tensor: Tensor) -> Tensor:
    """Permute the dimensions into memory order, which makes channels-last weights contiguous."""
    in_memory_order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(in_memory_order)


class _Sample:
    """Sampled runs of one width from several parameters.

    ``counts``: the number of weights that each element represents."""

    def __init__(self, runs: list[Tensor], counts: list[Tensor]) -> None:
        dtype = reduce(torch.promote_types, (run.dtype for run in runs), torch.float32)
        self._runs = runs
        self._counts = torch.cat(counts).to(dtype)
        self._pair = self._counts.new_empty(2, self._counts.numel())
        # the weights after and before the update
        self._rows = [row.view(-1, runs[0].shape[1]) for row in self._pair]

    def take(self, row: int) -> None:
        """Copy the current weights into row 0 or 1."""
        torch.cat(self._runs, out=self._rows[row])

    def squares(self) -> Tensor:
        """Return the squared norms of the change and of the weights before, shape (2,)."""
        self.take(0)
        self._rows[0].sub_(self._rows[1])
        return self._pair.square_().mv(self._counts)
