"""How large an update is against the weights: |change| / |weights|; about 1e-3 is usual."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from oneloop.basics.exact_sums import NOTHING, digit_rows, square_ratio
from oneloop.basics.tensors import as_real, first_element, local

_SAMPLED = 1 << 13
"""weights at most whose update is measured; of larger models a sample, which tells the ratio to about 1 %"""
_RUN = 64  # weights that lie side by side are taken together: memory is read by lines


class UpdateRatio:
    """How large an update is against the weights.

    Of models with more than some thousand weights a fixed sample is taken, the same share of each parameter where that
    is possible: each weight of the sample stands for as many of its parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        mine = [_dense(as_real(local(parameter.detach()))) for parameter in parameters]
        stride = max(1, sum(part.numel() for part in mine) // _SAMPLED)
        by_width: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for part in mine:
            if part.numel() and part.is_contiguous():
                width = min(_RUN, part.numel())
                runs = part.view(-1)[: part.numel() // width * width].view(-1, width)[::stride]
                counts = torch.full((runs.numel(),), part.numel() / runs.numel(), device=part.device)
                by_width[width].append((runs, counts))
        self._samples = [_Sample(*map(list, zip(*each, strict=True))) for each in by_width.values()]
        self._begun = False

    def before(self) -> None:
        """Remembers the weights."""
        for sample in self._samples:
            sample.take(1)
        self._begun = True

    def values(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of the change since :meth:`before` and of the weights then, 0-dim, for :meth:`ratio`.

        Both are 0 where :meth:`before` was not called, and on a rank that holds no weights.
        """
        each = [sample.squares() for sample in self._samples] if self._begun else []
        self._begun = False
        moved, size = reduce(torch.add, each) if each else like.new_zeros(2)
        return moved, size

    @staticmethod
    def ratio(ranks: Sequence[Sequence[float]]) -> float | None:
        """The ratio, by what all ranks told; None where nothing was measured."""
        moved, size = (sum(values) for values in zip(*ranks, strict=True))
        return (moved / size) ** 0.5 if size else None


class ExactUpdateRatio:
    """The same, to the same bits however the weights are sharded.

    Of models with more than some thousand weights a fixed sample is taken, by their places in the whole model.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trained = list(parameters)
        stride = max(1, sum(parameter.numel() for parameter in trained) // _SAMPLED)
        self._chosen: list[tuple[Tensor, Tensor]] = []  # this rank's part of a parameter, and the places in it
        offset = 0
        for parameter in trained:
            mine = as_real(local(parameter.detach()))
            first = offset + first_element(parameter)
            offset += parameter.numel()
            begin = -(-(first // _RUN) // stride) * stride
            runs = torch.arange(begin, max(begin, -(-(first + mine.numel()) // _RUN)), stride)
            places = (runs[:, None] * _RUN + torch.arange(_RUN)).view(-1) - first
            places = places[(places >= 0) & (places < mine.numel())]
            if len(places):
                self._chosen.append((mine, places.to(mine.device)))
        self._before: Tensor | None = None

    def _taken(self) -> Tensor:
        return torch.cat([mine.reshape(-1).index_select(0, places) for mine, places in self._chosen])

    def before(self) -> None:
        """Remembers the weights."""
        self._before = self._taken() if self._chosen else None

    def values(self, like: Tensor) -> tuple[Tensor, ...]:
        """Digits of the squared norms of the change since :meth:`before` and of the weights then, for :meth:`ratio`."""
        if self._before is None:
            return tuple(like.new_tensor([NOTHING, 0.0, 0.0, 0.0] * 2, dtype=torch.float64))
        parts, self._before = (self._taken() - self._before, self._before), None
        return tuple(torch.cat([digit_rows([part])[0] for part in parts]))

    @staticmethod
    def ratio(ranks: Sequence[Sequence[float]]) -> float | None:
        """The ratio, by what all ranks told; None where nothing was measured."""
        half = len(ranks[0]) // 2
        found = square_ratio([values[:half] for values in ranks], [values[half:] for values in ranks])
        return found**0.5 if found == found else None


def _dense(tensor: Tensor) -> Tensor:
    """The same elements with the dimensions in the order of memory, as channels-last weights are not."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


class _Sample:
    """Runs of one width, out of several parameters, and for how many weights each element stands."""

    def __init__(self, runs: list[Tensor], counts: list[Tensor]) -> None:
        dtype = reduce(torch.promote_types, (run.dtype for run in runs), torch.float32)
        self._runs, self._counts = runs, torch.cat(counts).to(dtype)
        self._pair = self._counts.new_empty(2, self._counts.numel())
        self._rows = [row.view(-1, runs[0].shape[1]) for row in self._pair]  # the weights afterwards, and those before

    def take(self, row: int) -> None:
        torch.cat(self._runs, out=self._rows[row])

    def squares(self) -> Tensor:
        """Squared norms of the change and of the weights before, of shape (2,)."""
        self.take(0)
        self._rows[0].sub_(self._rows[1])
        return self._pair.square_().mv(self._counts)
