"""Sums of losses and weights of an evaluation.

They are added in arrival order, or in an order that does not depend on the ranks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum, tree_sum
from oneloop.basics.seeds import reseed
from oneloop.tasks.whole_batch import columns_of

_EXACT = {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}
"""torchmetrics reductions that do not depend on the number of ranks, except for floating-point
sums"""


class Together:
    """Sums per source, added in arrival order.

    Args:
        task: its ``loss`` and, with ``metrics``, its ``update`` are called.
        sources: number of sources.
        device: device of the sums.
        metrics: the task's metrics of this evaluation, or None.
    """

    def __init__(self, task: Any, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._task = task
        self._metrics = metrics
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(sources, dtype=wide, device=device)
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
                their lists have the dtypes that the reduction over ranks needs; then they are
                reset.
        """
        loss, outputs = self._task.loss(model, batch)
        if self._metrics is not None and (idle or source is not None):
            self._task.update(self._metrics, batch, outputs)
        self._add(source, loss, weight, idle=idle)
        return outputs

    def _add(self, source: int | None, loss: Tensor, weight: float, *, idle: bool) -> None:
        if source is None:
            if idle:
                reset_metrics(self._metrics)
            return
        self._totals[source] += loss
        self._weights[source] += weight

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source over all ranks. Collective: call on every rank.

        ``each``: most micro-batches of a rank.
        """
        weights = torch.tensor(self._weights, dtype=self._totals.dtype, device=self._totals.device)
        own = torch.stack([self._totals, weights])
        totals, total_weights = accelerator.reduce(own, "sum").tolist()
        return totals, total_weights


class Apart(Together):
    """Losses, weights and floating-point metric sums, kept apart for each micro-batch.

    Results then do not depend on the ranks. Floating-point metric sums are stored and reset after
    each micro-batch; integer sums are exact. Some torchmetrics states are not sums, extremes or
    lists: the inputs of these metrics are stored and replayed at the end in one order. The
    arguments are those of :class:`Together`.
    """

    def __init__(self, task: Any, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._task = task
        self._number = sources
        self._device = device
        self._metrics = metrics

        # With shared states, each metric would reset the others.
        if hasattr(metrics, "_enable_compute_groups"):
            metrics._enable_compute_groups = False
        self._recorded = list[_RecordedUpdates]()
        for metric in _metrics(metrics):
            if not _is_exact(metric):
                self._recorded.append(_RecordedUpdates(metric))
        self._floating = [*_floating_sums(metrics)]

        # One entry for each micro-batch of this rank.
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def _add(self, source: int | None, loss: Tensor, weight: float, *, idle: bool) -> None:
        if source is None:
            if idle:
                reset_metrics(self._metrics)
                for recorded in self._recorded:
                    recorded.calls.clear()
            return
        self._sources.append(source)
        self._losses.append(loss.detach())
        self._weights.append(weight)
        for floating in self._floating:
            floating.take()

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
        gathered = accelerator.gather(local[None]).view(-1, 3).tolist()
        losses_of: list[list[float]] = [[] for _ in range(self._number)]
        weights_of: list[list[float]] = [[] for _ in range(self._number)]
        for source, loss, weight in gathered:
            if source >= 0:
                losses_of[int(source)].append(loss)
                weights_of[int(source)].append(weight)

        # Add the metric sums of all micro-batches in one tree, the same for any number of ranks.
        for floating in self._floating:
            total = tree_sum(floating.gathered(accelerator, each))
            if not accelerator.is_main_process:
                total = torch.zeros_like(total)
            floating.state().copy_(total)
        for recorded in self._recorded:
            recorded.replay(self._device)
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

        Every rank computes them, and all metrics; those of other ranks than 0 are then reset.
        """
        parts = self._whole(accelerator, self._parts)
        columns = self._whole(accelerator, self._columns)
        if self._metrics is not None:
            self._task.update(self._metrics, columns, parts)
            if not accelerator.is_main_process:
                reset_metrics(self._metrics)

        # Count the samples of each source, and add up its weight.
        known = _gathered(accelerator, torch.tensor(self._weights, device=accelerator.device))
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

    def _whole(self, accelerator: Any, micro_batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of the whole set, in the order of its samples."""
        # Find the rows of samples: each micro-batch is padded to the same number of rows.
        used = list[int]()
        for number, (_, samples) in enumerate(self._cut):
            first_row = number * self._micro
            used += range(first_row, first_row + len(samples))
        rows = torch.tensor(used, device=accelerator.device)

        # Pad each tensor of this rank, gather those of all ranks, and keep the rows of samples.
        whole = {}
        for name, first in micro_batches[0].items():
            if not first.ndim:
                whole[name] = first
                continue
            own = first.new_zeros(len(micro_batches), self._micro, *first.shape[1:])
            for number, one in enumerate(micro_batches):
                if one[name].shape[1:] != first.shape[1:]:
                    raise ValueError(
                        f"the rows of {name!r} have several shapes; let embed return rows of "
                        "one shape"
                    )
                own[number, : len(one[name])] = one[name]
            whole[name] = _gathered(accelerator, own.flatten(0, 1))[rows]
        return whole


def _rows_of(whole: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return these rows of each tensor. A 0-dim tensor has no rows, and stays as it is."""
    chosen = {}
    for name, value in whole.items():
        chosen[name] = value[rows] if value.ndim else value
    return chosen


def _gathered(accelerator: Any, own: Tensor) -> Tensor:
    """Return the rows of all ranks. Collective: call on every rank."""
    if accelerator.num_processes > 1:
        return accelerator.gather(own)  # type: ignore[no-any-return]
    return own


def reset_metrics(metrics: Any) -> None:
    """Reset all states of a task's metrics; list states keep empty tensors with their dtypes."""
    if hasattr(metrics, "sums"):
        for state in metrics.sums():
            state.zero_()
        return
    for metric in _metrics(metrics):
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            if isinstance(state, list):
                setattr(metric, name, [tensor[:0] for tensor in state])
            else:
                state.copy_(default)


@dataclass
class _FloatingSum:
    """A floating-point sum of a metric, with its values of each micro-batch."""

    metrics: Any
    name: str | int  # attribute of the state, or its index in ``metrics.sums()``
    values: list[Tensor] = field(default_factory=list)  # by micro-batch of this rank

    def state(self) -> Tensor:
        """Return the metric's own tensor. Look it up each time: torchmetrics may replace it."""
        state: Tensor
        if isinstance(self.name, int):
            state = self.metrics.sums()[self.name]
        else:
            state = getattr(self.metrics, self.name)
        return state

    def take(self) -> None:
        """Store the value of this micro-batch, and begin the next one at zero."""
        state = self.state()
        self.values.append(state.clone())
        state.zero_()

    def gathered(self, accelerator: Any, each: int) -> Tensor:
        """Return the values of all ranks, padded with zeros to ``each`` per rank. Collective."""
        state = self.state()
        padding = [torch.zeros_like(state)] * (each - len(self.values))
        own = torch.stack([*self.values, *padding])
        return accelerator.gather(own[None]).view(-1, *state.shape)  # type: ignore[no-any-return]


def _floating_sums(metrics: Any) -> Iterator[_FloatingSum]:
    """Yield the floating-point sums of a task's metrics."""
    if metrics is None:
        return
    if hasattr(metrics, "sums"):
        for index, state in enumerate(metrics.sums()):
            if state.is_floating_point():
                yield _FloatingSum(metrics, index)
        return
    for metric in _metrics(metrics):
        if not _is_exact(metric):
            continue
        for name, reduction in metric._reductions.items():
            state = getattr(metric, name)
            is_sum = reduction.__name__ == "dim_zero_sum"
            if is_sum and torch.is_tensor(state) and state.is_floating_point():
                yield _FloatingSum(metric, name)


def _metrics(metrics: Any) -> Iterator[Any]:
    """Yield the metrics of a torchmetrics collection, including those inside wrappers."""
    if metrics is None or hasattr(metrics, "sums"):
        return
    for outer in metrics.values():
        for metric in outer.modules():
            if hasattr(metric, "_reductions"):
                yield metric


def _is_exact(metric: Any) -> bool:
    """Whether reducing the states over ranks gives the same result as one rank."""
    for reduction in metric._reductions.values():
        if getattr(reduction, "__name__", None) not in _EXACT:
            return False
    return True


class _RecordedUpdates:
    """Records the update() calls of a metric, and replays those of all ranks in order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._update = metric.update
        self.calls: list[Any] = []
        metric.update = self

    def __call__(self, *given: Any, **named: Any) -> None:
        self.calls.append(_to_device((given, named), torch.device("cpu")))

    def replay(self, device: torch.device) -> None:
        """Update the metric with the inputs of all ranks. Collective: call on every rank."""
        from accelerate.utils import gather_object

        # The metric needs no reduction: it has the inputs of all ranks.
        self._metric.distributed_available_fn = lambda: False
        for given, named in gather_object(self.calls):
            self._update(*_to_device(given, device), **_to_device(named, device))


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to_device(inside, device) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_to_device(inside, device) for inside in value]
    if torch.is_tensor(value):
        return value.detach().to(device)
    return value
