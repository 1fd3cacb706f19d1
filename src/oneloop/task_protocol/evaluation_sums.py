"""LossSums and weights of an evaluation, summed over all ranks."""

from collections.abc import Sequence
from functools import partial, reduce
from io import BytesIO
from itertools import chain
from operator import add
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils._pytree import tree_map

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.seeds import reseed
from oneloop.basics.wide_sums import on_host
from oneloop.task_protocol.whole_batch import check_alike, columns_of, described

Sums = list[tuple[float, float]]
"""loss and weight of each source"""


class LossSums:
    """The losses of this rank's micro-batches. Their sums are in float64.

    Args:
        task: its ``loss`` is called.
        sources: number of sources.
        exact: the sums are rounded once, and so do not depend on the ranks. Otherwise each rank
            adds in order of arrival.
    """

    def __init__(self, task: Any, sources: int, *, exact: bool = False) -> None:
        self._task = task
        self._number = sources
        self._exact = exact

        # One entry for each micro-batch that counts.
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def batch(self, model: Any, batch: Any, source: int | None, weight: float) -> Any:
        """Compute the loss of a micro-batch, and return its outputs. No host sync.

        Args:
            model: the model, in eval mode.
            batch: the micro-batch, on the device.
            source: index of its source; None: it does not count.
            weight: its weight.
        """
        loss, outputs = self._task.loss(model, batch)
        if source is not None:
            self._sources.append(source)
            self._losses.append(loss.detach().clone())
            self._weights.append(weight)
        return outputs

    def summed(self) -> Sums:
        """Return loss and weight of each source over all ranks. Collective: call on every rank."""
        losses = on_host(torch.stack(self._losses)).tolist() if self._losses else []
        own = [*zip(self._sources, losses, self._weights, strict=True)]
        ranks = gather_object([own])  # type: ignore[no-untyped-call]
        sums = []
        for source in range(self._number):
            losses_of = [[loss for of, loss, _ in rank if of == source] for rank in ranks]
            weights_of = [[weight for of, _, weight in rank if of == source] for rank in ranks]
            sums.append((self._sum(losses_of), self._sum(weights_of)))
        return sums

    def _sum(self, ranks: Sequence[Sequence[float]]) -> float:
        """Return the sum of the numbers of all ranks."""
        if self._exact:
            return rounded_sum(chain.from_iterable(ranks))
        return reduce(add, [reduce(add, numbers, 0.0) for numbers in ranks])


class WholeBatches:
    """LossSums over whole batches: windows of neighbouring samples of a source.

    Args:
        task: has ``embed`` and ``batch_loss``.
        sources: the samples of each source.
        cut: pairs (source, samples), one for each micro-batch of all ranks.
        window: samples of each loss.
        device: of the model.
        seed: seed of the random numbers of a loss.
    """

    def __init__(
        self,
        task: Any,
        sources: Sequence[range],
        cut: Sequence[tuple[int, range]],
        window: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._task = task
        self._sources = sources
        self._cut = cut
        self._window = window
        self._device = device
        self._seed = seed
        self._micro_batches: list[Any] = []  # of this rank: parts and columns, and weight
        self.whole: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        """parts and columns of the whole set, after :meth:`summed`"""

    def batch(self, model: Any, batch: Any, source: int | None, weight: float) -> Any:
        """Embed a micro-batch, and return its parts; see :meth:`LossSums.batch`."""
        parts = self._task.embed(model, batch)
        self._micro_batches.append(((parts, columns_of(self._task, batch)), weight))
        return parts

    @torch.no_grad()
    def summed(self) -> Sums:
        """Return loss and weight of each source. Collective: call on every rank.

        Every rank computes them. Raise Inexact on all ranks if the rows of two micro-batches differ
        in shape or dtype.
        """
        # Gather the micro-batches of all ranks. Those that do not count come last.
        file = BytesIO()
        torch.save(self._micro_batches, file)  # pickle alone does not know all dtypes
        gathered = list[Any]()
        for content in gather_object([file.getvalue()]):  # type: ignore[no-untyped-call]
            gathered += torch.load(BytesIO(content), map_location="cpu")
        tensors, weights = zip(*gathered[: len(self._cut)], strict=True)
        first = described(tensors[0][0] | tensors[0][1])
        for (parts, columns), (_, samples) in zip(tensors, self._cut, strict=True):
            check_alike(parts | columns, first, samples=len(samples))
        self.whole = tree_map(partial(_join, device=self._device), *tensors)

        # Add the losses of the windows of each source, and the weights of its micro-batches.
        losses = []
        for samples in self._sources:
            total = 0.0
            for start in samples[:: self._window]:
                end = min(start + self._window, samples.stop)
                reseed(self._device, self._seed, start, others=True)
                parts, columns = tree_map(partial(_rows, start=start, end=end), self.whole)
                total += float(self._task.batch_loss(parts, columns)[0])  # host sync
            losses.append(total)
        weight_of = [0.0] * len(losses)
        for (source, _), weight in zip(self._cut, weights, strict=True):
            weight_of[source] += weight
        return [*zip(losses, weight_of, strict=True)]


def _join(*rows: Tensor, device: torch.device) -> Tensor:
    """Return the rows of all micro-batches; a 0-dim tensor has none, and is that of the first."""
    return (torch.cat(rows) if rows[0].ndim else rows[0]).to(device)


def _rows(whole: Tensor, start: int, end: int) -> Tensor:
    return whole[start:end] if whole.ndim else whole
