"""Sums of losses and weights of an evaluation.

They are added in arrival order, or in an order that does not depend on the ranks.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import gathered, summed
from oneloop.basics.wide_sums import WideSum
from oneloop.task_protocol.evaluation_metrics import Metrics
from oneloop.task_protocol.metric_states import MetricStates, compute_alone, reset_sums, seeded
from oneloop.task_protocol.whole_batch import Described, check_alike, columns_of, described


def computed(metrics: Metrics) -> Mapping[str, Any]:
    """Add up the sums of all ranks, and compute. Collective: call on every rank.

    Args:
        metrics: of this rank.
    """
    # The same sums in the same order on every rank.
    for own in metrics.sums():
        own.copy_(summed(own))
    return metrics.compute()


class Together:
    """Sums per source, added in arrival order.

    Args:
        task: its ``loss`` and, with ``metrics``, its ``update`` are called.
        sources: number of sources.
        device: device of the sums.
        metrics: the task's metrics of this evaluation, or None.
        ranks: number of ranks.
    """

    def __init__(
        self, task: Any, sources: int, device: torch.device, metrics: Any = None, *, ranks: int = 1
    ) -> None:
        self._task = task
        self._metrics = metrics
        self._states = MetricStates(metrics, apart=False, ranks=ranks)
        self._totals = [WideSum(device=device) for _ in range(sources)]
        self._weights = [0.0] * sources

    def batch(
        self, model: Any, batch: Any, source: int | None, weight: float, *, idle: bool = False
    ) -> Any:
        """Compute and add a micro-batch, and return its outputs.

        Args:
            model: the model, in eval mode.
            batch: the micro-batch, on the device.
            source: index of its source; None: it is not counted.
            weight: its weight.
            idle: this rank has only this micro-batch, without a source. Its metrics see it, so that
                they have the attributes that ``update`` sets; then their states are reset.
        """
        loss, outputs = self._task.loss(model, batch)
        if self._metrics is not None and (idle or source is not None):
            self._task.update(self._metrics, batch, outputs)
        if source is not None:
            self._add(source, loss, weight)
        elif idle:
            self._states.clear()
        return outputs

    def _add(self, source: int, loss: Tensor, weight: float) -> None:
        self._totals[source].add(loss)
        self._weights[source] += weight

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source over all ranks. Collective: call on every rank.

        ``each``: most micro-batches of a rank.
        """
        sums = torch.stack([total.value() for total in self._totals])
        weights = torch.tensor(self._weights, dtype=sums.dtype, device=sums.device)
        own = torch.stack([sums, weights])
        self._states.combine(accelerator, each=each)
        totals, total_weights = accelerator.reduce(own, "sum").tolist()
        return totals, total_weights


class Apart(Together):
    """Losses, weights and floating-point metric sums, kept apart for each micro-batch.

    Results then do not depend on the ranks. The arguments are those of :class:`Together`.
    """

    def __init__(
        self, task: Any, sources: int, device: torch.device, metrics: Any = None, *, ranks: int = 1
    ) -> None:
        self._task = task
        self._number = sources
        self._device = device
        self._metrics = metrics
        self._states = MetricStates(metrics, apart=True, ranks=ranks)

        # One entry for each micro-batch of this rank.
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def _add(self, source: int, loss: Tensor, weight: float) -> None:
        self._sources.append(source)
        self._losses.append(loss.detach())
        self._weights.append(weight)
        self._states.micro_batch()

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source over all ranks. Collective: call on every rank.

        Only rank 0's metrics get the sums. ``each``: most micro-batches of a rank.
        """
        wide = torch.float64

        # Fill one row for each micro-batch: source, loss, weight. Source -1 is padding.
        local = torch.zeros(each, 3, dtype=wide, device=self._device)
        local[:, 0] = -1.0
        if self._losses:
            known = torch.tensor([self._sources, self._weights], dtype=wide, device=self._device)
            losses = torch.stack(self._losses).to(wide)
            rows = torch.stack([known[0], losses, known[1]], dim=1)
            local[: len(rows)] = rows

        # Gather the rows of all ranks. Rank order is micro-batch order.
        rows_of_all = gathered(local).tolist()
        losses_of: list[list[float]] = [[] for _ in range(self._number)]
        weights_of: list[list[float]] = [[] for _ in range(self._number)]
        for source, loss, weight in rows_of_all:
            if source >= 0:
                losses_of[int(source)].append(loss)
                weights_of[int(source)].append(weight)

        self._states.combine(accelerator, each=each)
        totals = [*map(rounded_sum, losses_of)]
        weights = [*map(rounded_sum, weights_of)]
        return totals, weights


class WholeBatches:
    """Losses over whole batches: windows of neighbouring samples of a source.

    Metrics see the whole set at once.

    Args:
        task: has ``embed`` and ``batch_loss``.
        metrics: the task's metrics of this evaluation, or None.
        cut: pairs (source, samples), one for each micro-batch of all ranks.
        micro: most samples of a micro-batch.
        window: samples of each loss.
        seed: device and seed of the random numbers of a loss.
    """

    def __init__(
        self, task: Any, metrics: Any, cut: Any, *, micro: int, window: int, seed: Any
    ) -> None:
        self._task = task
        self._metrics = metrics
        self._cut = cut
        self._micro = micro
        self._window = window
        self._seed_device, self._seed = seed

        # One entry for each micro-batch of this rank.
        self._parts: list[dict[str, Tensor]] = []
        self._columns: list[dict[str, Tensor]] = []
        self._weights: list[float] = []

    def batch(
        self, model: Any, batch: Any, source: int | None, weight: float, *, idle: bool = False
    ) -> Any:
        """Embed a micro-batch, and return its parts; see :meth:`Together.batch`."""
        self._parts.append(self._task.embed(model, batch))
        self._columns.append(columns_of(self._task, batch))
        self._weights.append(0.0 if source is None else weight)
        return self._parts[-1]

    @torch.no_grad()
    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source. Collective: call on every rank.

        Every rank computes them, and all metrics. Sums that are reduced later are kept on rank 0.
        Raise Inexact on all ranks if the rows of two micro-batches differ in shape or dtype.
        """
        first = self._checked()
        parts = self._whole(accelerator, self._parts, first)
        columns = self._whole(accelerator, self._columns, first)
        if self._metrics is not None:
            compute_alone(self._metrics)
            with seeded(accelerator.device):
                self._task.update(self._metrics, columns, parts)
            if not accelerator.is_main_process:
                reset_sums(self._metrics)

        # Count the samples of each source, and add up its weight.
        known = gathered(torch.tensor(self._weights, device=accelerator.device))
        count = Counter[int]()
        weights = Counter[int]()
        for (source, samples), weight in zip(self._cut, known.tolist(), strict=False):
            count[source] += len(samples)
            weights[source] += weight

        # Add the losses of the windows of each source. Its samples follow those of the one before.
        totals = [0.0] * len(count)
        end = 0
        for source, number in count.items():
            begin, end = end, end + number
            for start in range(begin, end, self._window):
                rows = slice(start, min(start + self._window, end))
                reseed(self._seed_device, self._seed, start, others=True)
                loss = self._task.batch_loss(_rows_of(parts, rows), _rows_of(columns, rows))[0]
                totals[source] += float(loss)  # host sync
        return totals, [*weights.values()]

    def _checked(self) -> Described:
        """Compare the micro-batches of all ranks, and return the first one. Collective."""
        from accelerate.utils import gather_object

        own = []
        for parts, columns in zip(self._parts, self._columns, strict=True):
            own.append(described(parts | columns))
        found = gather_object(own)  # type: ignore[no-untyped-call]
        for number, one in enumerate(found):
            # A rank without micro-batches left repeats the first one.
            _, samples = self._cut[number if number < len(self._cut) else 0]
            check_alike(one, found[0], samples=len(samples))
        first: Described = found[0]
        return first

    def _whole(
        self, accelerator: Any, micro_batches: list[dict[str, Tensor]], names: Collection[str]
    ) -> dict[str, Tensor]:
        """Return the tensors of the whole set, in the order of its samples; ``names`` in order."""
        # Find the rows of samples: each micro-batch is padded to the same number of rows.
        used = list[int]()
        for number, (_, samples) in enumerate(self._cut):
            first_row = number * self._micro
            used += range(first_row, first_row + len(samples))
        rows = torch.tensor(used, device=accelerator.device)

        # Pad each tensor of this rank, gather those of all ranks, and keep the rows of samples.
        whole = {}
        for name in names:
            if name not in micro_batches[0]:
                continue
            first = micro_batches[0][name]
            if not first.ndim:
                whole[name] = gathered(first[None])[0]  # rank 0's
                continue
            own = first.new_zeros(len(micro_batches), self._micro, *first.shape[1:])
            for number, one in enumerate(micro_batches):
                own[number, : len(one[name])] = one[name]
            whole[name] = gathered(own.flatten(0, 1))[rows]
        return whole


def _rows_of(whole: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return these rows of each tensor. A 0-dim tensor has no rows, and stays as it is."""
    chosen = {}
    for name, value in whole.items():
        chosen[name] = value[rows] if value.ndim else value
    return chosen
