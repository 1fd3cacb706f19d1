"""Sums of losses and weights of an evaluation: in arrival order, or in an order that does not
depend on the ranks."""

from collections import Counter
from collections.abc import Iterator
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
    """Sums per source, added in arrival order."""

    def __init__(self, task: Any, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._task, self._metrics = task, metrics
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(sources, dtype=wide, device=device)
        self._weights = [0.0] * sources

    def batch(
        self, model: Any, batch: Any, source: int | None, weight: float, *, idle: bool = False
    ) -> Any:
        """Compute and add a micro-batch; without a ``source`` it is not counted. Return the
        outputs.

        An ``idle`` rank has only such a micro-batch. Its metrics see it, so that their lists have
        the dtypes that the reduction over ranks needs; then they are reset."""
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
        """Return loss and weight of each source over all ranks. Collective: call on every rank."""
        weights = torch.tensor(self._weights, dtype=self._totals.dtype, device=self._totals.device)
        totals, total_weights = accelerator.reduce(
            torch.stack([self._totals, weights]), "sum"
        ).tolist()
        return totals, total_weights


class Apart(Together):
    """Losses, weights and floating-point metric sums of each micro-batch, so that results do not
    depend on the ranks.

    Floating-point metric sums are stored and reset after each micro-batch; integer sums are exact.
    Some torchmetrics states are not sums, extremes or lists: the inputs of these metrics are stored
    and replayed at the end in one order.
    """

    def __init__(self, task: Any, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._task, self._number, self._device, self._metrics = task, sources, device, metrics
        if hasattr(metrics, "_enable_compute_groups"):
            # with shared states, each metric would reset the others
            metrics._enable_compute_groups = False
        self._recorded = [
            _RecordedUpdates(metric) for metric in _metrics(metrics) if not _is_exact(metric)
        ]
        self._floating = [*_floating_sums(metrics)]
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._states: list[list[Tensor]] = [[] for _ in self._floating]

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
        for key, states in zip(self._floating, self._states, strict=True):
            state = _state(key)
            states.append(state.clone())
            state.zero_()

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source over all ranks (``each``: most micro-batches of a
        rank). Only rank 0's metrics get the sums. Collective: call on every rank."""
        wide, device = torch.float64, self._device
        local = torch.zeros(each, 3, dtype=wide, device=device)
        local[:, 0] = -1.0
        if self._losses:
            known = torch.tensor([self._sources, self._weights], dtype=wide, device=device)
            local[: len(self._losses)] = torch.stack(
                [known[0], torch.stack(self._losses).to(wide), known[1]], dim=1
            )
        # rank order is micro-batch order
        rows = accelerator.gather(local[None]).view(-1, 3).tolist()
        by_source = [[row for row in rows if row[0] == source] for source in range(self._number)]
        for key, states in zip(self._floating, self._states, strict=True):
            state = _state(key)
            padded = torch.stack([*states, *[torch.zeros_like(state)] * (each - len(states))])
            total = tree_sum(accelerator.gather(padded[None]).view(-1, *state.shape))
            state.copy_(total if accelerator.is_main_process else torch.zeros_like(total))
        for recorded in self._recorded:
            recorded.replay(self._device)
        totals, weights = (
            [rounded_sum(row[column] for row in rows) for rows in by_source] for column in (1, 2)
        )
        return totals, weights


class WholeBatches:
    """Losses over whole batches: windows of neighbouring samples of a source. Metrics see the whole
    set at once.

    ``cut``: source and samples of each micro-batch (of up to ``micro`` samples) of all ranks;
    ``seed``: device and seed of the random numbers of a loss."""

    def __init__(
        self, task: Any, metrics: Any, cut: Any, *, micro: int, window: int, seed: Any
    ) -> None:
        self._task, self._metrics, self._cut = task, metrics, cut
        self._micro, self._window, self._seed = micro, window, seed
        self._parts: list[dict[str, Tensor]] = []
        self._columns: list[dict[str, Tensor]] = []
        self._weights: list[float] = []

    def batch(
        self, model: Any, batch: Any, source: int | None, weight: float, *, idle: bool = False
    ) -> Any:
        """Embed a micro-batch; without a ``source`` it is not counted. Return the parts."""
        self._parts.append(self._task.embed(model, batch))
        self._columns.append(columns_of(self._task, batch))
        self._weights.append(0.0 if source is None else weight)
        return self._parts[-1]

    @torch.no_grad()
    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source. Every rank computes them, and all metrics; those
        of other ranks than 0 are then reset. Collective: call on every rank."""
        parts, columns = (self._whole(accelerator, own) for own in (self._parts, self._columns))
        if self._metrics is not None:
            self._task.update(self._metrics, columns, parts)
            if not accelerator.is_main_process:
                reset_metrics(self._metrics)
        known = _gathered(accelerator, torch.tensor(self._weights, device=accelerator.device))
        ends, weights = Counter[int](), Counter[int]()
        for (source, samples), weight in zip(self._cut, known.tolist(), strict=False):
            ends[source] += len(samples)
            weights[source] += weight
        totals, end = [0.0] * len(ends), 0
        for source, number in ends.items():
            begin, end = end, end + number
            for start in range(begin, end, self._window):
                rows = slice(start, min(start + self._window, end))
                window = [
                    {k: v[rows] if v.ndim else v for k, v in whole.items()}
                    for whole in (parts, columns)
                ]
                reseed(self._seed[0], self._seed[1], start, others=True)
                totals[source] += float(self._task.batch_loss(*window)[0])
        return totals, [*weights.values()]

    def _whole(self, accelerator: Any, micro_batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of the whole set, in the order of its samples."""
        used = [
            range(n * self._micro, n * self._micro + len(samples))
            for n, (_, samples) in enumerate(self._cut)
        ]
        rows, whole = (
            torch.tensor([row for some in used for row in some], device=accelerator.device),
            {},
        )
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


def _gathered(accelerator: Any, own: Tensor) -> Tensor:
    return accelerator.gather(own) if accelerator.num_processes > 1 else own  # type: ignore[no-any-return]


def reset_metrics(metrics: Any) -> None:
    """Reset all states of a task's metrics; list states keep empty tensors with their dtypes."""
    for state in metrics.sums() if hasattr(metrics, "sums") else ():
        state.zero_()
    for metric in _metrics(metrics):
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            if isinstance(state, list):
                setattr(metric, name, [tensor[:0] for tensor in state])
            else:
                state.copy_(default)


def _floating_sums(metrics: Any) -> Iterator[tuple[Any, str | int]]:
    """Yield the floating-point sums: an object, and the name or index of its state."""
    if metrics is None:
        return
    if hasattr(metrics, "sums"):
        yield from (
            (metrics, index)
            for index, state in enumerate(metrics.sums())
            if state.is_floating_point()
        )
        return
    for metric in _metrics(metrics):
        for name, reduction in metric._reductions.items() if _is_exact(metric) else ():
            state = getattr(metric, name)
            if (
                reduction.__name__ == "dim_zero_sum"
                and torch.is_tensor(state)
                and state.is_floating_point()
            ):
                yield metric, name


def _metrics(metrics: Any) -> Iterator[Any]:
    """Yield the metrics of a torchmetrics collection, including those inside wrappers."""
    if metrics is None or hasattr(metrics, "sums"):
        return
    for outer in metrics.values():
        yield from (metric for metric in outer.modules() if hasattr(metric, "_reductions"))


def _is_exact(metric: Any) -> bool:
    """Whether reducing the states over ranks gives the same result as one rank."""
    return all(
        getattr(reduction, "__name__", None) in _EXACT for reduction in metric._reductions.values()
    )


class _RecordedUpdates:
    """Records the update() calls of a metric, and replays those of all ranks in order."""

    def __init__(self, metric: Any) -> None:
        self._metric, self._update = metric, metric.update
        self.calls: list[Any] = []
        metric.update = self

    def __call__(self, *given: Any, **named: Any) -> None:
        self.calls.append(_to_device((given, named), torch.device("cpu")))

    def replay(self, device: torch.device) -> None:
        from accelerate.utils import gather_object

        self._metric.distributed_available_fn = lambda: False  # it has the inputs of all ranks
        for given, named in gather_object(self.calls):
            self._update(*_to_device(given, device), **_to_device(named, device))


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to_device(inside, device) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_to_device(inside, device) for inside in value]
    return value.detach().to(device) if torch.is_tensor(value) else value


def _state(key: tuple[Any, str | int]) -> Tensor:
    metrics, name = key
    state: Tensor = metrics.sums()[name] if isinstance(name, int) else getattr(metrics, name)
    return state
