"""Losses and weights of an evaluation, summed over all ranks. Collective: call on every rank."""

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
from oneloop.task_protocol.whole_batch import check_alike, described

Sums = list[tuple[float, float]]
"""loss and weight of each source"""


def loss_sums(
    losses: Sequence[tuple[int, Tensor, float]], sources: int, *, exact: bool = False
) -> Sums:
    """Return loss and weight of each source over all ranks. Their sums are in float64.

    Args:
        losses: source, loss and weight of each micro-batch of this rank that counts.
        sources: number of sources.
        exact: the sums are rounded once, and so do not depend on the ranks. Otherwise each rank
            adds in the order of its micro-batches.
    """
    values = on_host(torch.stack([loss for _, loss, _ in losses])).tolist() if losses else []
    rows = []
    for value, (source, _, weight) in zip(values, losses, strict=True):
        rows.append((source, value, weight))
    ranks = gather_object([rows])  # type: ignore[no-untyped-call]
    sums = []
    for number in range(sources):
        losses_of = [[loss for source, loss, _ in rank if source == number] for rank in ranks]
        weights_of = [[weight for source, _, weight in rank if source == number] for rank in ranks]
        sums.append((_sum(losses_of, exact), _sum(weights_of, exact)))
    return sums


def _sum(ranks: Sequence[Sequence[float]], exact: bool) -> float:
    """Return the sum of the numbers of all ranks."""
    if exact:
        return rounded_sum(chain.from_iterable(ranks))
    return reduce(add, [reduce(add, numbers, 0.0) for numbers in ranks])


Rows = tuple[dict[str, Tensor], dict[str, Tensor]]
"""parts and columns of a loss over the whole batch"""


@torch.no_grad()
def whole_batch_sums(
    task: Any,
    micro_batches: Sequence[tuple[Rows, float]],
    *,
    sources: Sequence[range],
    cut: Sequence[tuple[int, range]],
    window: int,
    device: torch.device,
    seed: int,
) -> tuple[Sums, Rows]:
    """Return loss and weight of each source, and the rows of the whole set. Every rank has them.

    The losses are those of windows of neighbouring samples of a source.

    Args:
        task: has ``batch_loss``.
        micro_batches: rows and weight of each micro-batch of this rank; those that do not count
            come last.
        sources: the samples of each source.
        cut: pairs (source, samples), one for each micro-batch of all ranks.
        window: samples of each loss.
        device: of the model.
        seed: seed of the random numbers of a loss.

    Raises:
        Inexact: on all ranks; the rows of two micro-batches differ in shape or dtype.
    """
    # Gather the micro-batches of all ranks.
    file = BytesIO()
    torch.save(micro_batches, file)  # pickle alone does not know all dtypes
    gathered = list[Any]()
    for content in gather_object([file.getvalue()]):  # type: ignore[no-untyped-call]
        gathered += torch.load(BytesIO(content), map_location="cpu")
    tensors, weights = zip(*gathered[: len(cut)], strict=True)
    first = described(tensors[0][0] | tensors[0][1])
    for (parts, columns), (_, samples) in zip(tensors, cut, strict=True):
        check_alike(parts | columns, first, samples=len(samples))
    whole: Rows = tree_map(partial(_join, device=device), *tensors)

    # Add the losses of the windows of each source, and the weights of its micro-batches.
    losses = []
    for span in sources:
        total = 0.0
        for start in span[::window]:
            end = min(start + window, span.stop)
            reseed(device, seed, start, others=True)
            parts, columns = tree_map(partial(_rows, start=start, end=end), whole)
            total += float(task.batch_loss(parts, columns)[0])  # host sync
        losses.append(total)
    weight_of = [0.0] * len(losses)
    for (source, _), weight in zip(cut, weights, strict=True):
        weight_of[source] += weight
    return [*zip(losses, weight_of, strict=True)], whole


def _join(*rows: Tensor, device: torch.device) -> Tensor:
    """Return the rows of all micro-batches; a 0-dim tensor has none, and is that of the first."""
    return (torch.cat(rows) if rows[0].ndim else rows[0]).to(device)


def _rows(whole: Tensor, start: int, end: int) -> Tensor:
    return whole[start:end] if whole.ndim else whole
