"""The update ratio |change of the weights| / |weights|; about 1e-3 is common."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from oneloop.basics.exact_sums import NOTHING, digit_rows, square_ratio
from oneloop.basics.tensors import as_real, first_element, local

# most weights to measure; of larger models a sample, which gives the ratio to about 1 %
_SAMPLED = 1 << 13
_RUN = 64  # adjacent weights that are sampled together: memory is read in cache lines


class UpdateRatio:
    """The ratio of the norms of update and weights.

    For models with more than some thousand weights it is estimated from a fixed sample, if possible
    the same share of each parameter. Each sampled weight counts for the weights of its parameter
    that it represents.

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
                counts = torch.full((number,), size / number, device=part.device)
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
        moved, size = (sum(values) for values in zip(*ranks, strict=True))
        return (moved / size) ** 0.5 if size else None


class ExactUpdateRatio:
    """The same ratio, bit-identical for every sharding.

    For models with more than some thousand weights it is estimated from a fixed sample of indices
    in the whole model.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trained = list(parameters)
        number_of_weights = sum(parameter.numel() for parameter in trained)
        stride = max(1, number_of_weights // _SAMPLED)
        # this rank's shard of a parameter, and sampled indices in it
        self._chosen: list[tuple[Tensor, Tensor]] = []
        offset = 0  # index of a parameter's first weight in the whole model
        for parameter in trained:
            mine = as_real(local(parameter.detach()))
            first = offset + first_element(parameter)
            offset += parameter.numel()
            # Of the runs that this shard overlaps, take those at a multiple of the stride.
            begin = -(-(first // _RUN) // stride) * stride
            last = first + mine.numel()
            end = -(-last // _RUN)
            runs = torch.arange(begin, max(begin, end), stride)
            indices = runs[:, None] * _RUN + torch.arange(_RUN)
            indices = indices.view(-1) - first
            inside = (indices >= 0) & (indices < mine.numel())
            indices = indices[inside]
            if len(indices):
                self._chosen.append((mine, indices.to(mine.device)))
        self._before: Tensor | None = None

    def _sampled(self) -> Tensor:
        parts = []
        for mine, indices in self._chosen:
            parts.append(mine.reshape(-1).index_select(0, indices))
        return torch.cat(parts)

    def before(self) -> None:
        """Store the current weights. Call it before the update."""
        self._before = self._sampled() if self._chosen else None

    def values(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the digits of what :meth:`UpdateRatio.values` returns."""
        before = self._before
        self._before = None
        if before is None:
            nothing = [NOTHING, 0.0, 0.0, 0.0]
            return tuple(like.new_tensor(nothing * 2, dtype=torch.float64))
        change = self._sampled() - before
        moved = digit_rows([change])[0]
        size = digit_rows([before])[0]
        return tuple(torch.cat([moved, size]))

    @staticmethod
    def ratio(ranks: Sequence[Sequence[float]]) -> float | None:
        """Return the ratio from the :meth:`values` of all ranks; None if nothing was measured."""
        half = len(ranks[0]) // 2
        moved = [values[:half] for values in ranks]
        size = [values[half:] for values in ranks]
        found = square_ratio(moved, size)
        return None if math.isnan(found) else found**0.5


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
