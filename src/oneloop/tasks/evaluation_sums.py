"""Losses and weights of an evaluation, summed as they come, or in one order however many ranks share them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum, tree_sum

_EXACT = {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}
"""reductions of torchmetrics that the number of ranks does not change, but for sums of floating numbers"""


class Together:
    """Sums per source, added as they arrive."""

    def __init__(self, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._metrics = metrics
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(sources, dtype=wide, device=device)
        self._weights = [0.0] * sources

    def batch(self, source: int | None, loss: Tensor, weight: float, *, idle: bool = False) -> None:
        """Take in a micro-batch; one without a ``source`` does not count.

        The metrics of an ``idle`` rank, which has no other, were given it, and forget it: they take part in the other
        ranks' sums, so they need the types of their lists.
        """
        if source is None:
            if idle:
                emptied(self._metrics)
            return
        self._totals[source] += loss
        self._weights[source] += weight

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Loss and weight of each source over all ranks. Every rank must get here."""
        weights = torch.tensor(self._weights, dtype=self._totals.dtype, device=self._totals.device)
        totals, everywhere = accelerator.reduce(torch.stack([self._totals, weights]), "sum").tolist()
        return totals, everywhere


class Apart:
    """Losses, weights and floating-point metric sums, one for each micro-batch, so that no order of ranks matters.

    Floating sums of the metrics are reset after each micro-batch (whole numbers are exact). Inputs of torchmetrics
    metrics whose states are no sums, extremes or lists are kept, and passed to them at the end, all ranks' in one
    order.
    """

    def __init__(self, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._number, self._device, self._metrics = sources, device, metrics
        if hasattr(metrics, "_enable_compute_groups"):
            metrics._enable_compute_groups = False  # metrics that share a state would each empty it
        self._kept = [_Kept(metric) for metric in _metrics(metrics) if not _adds_up(metric)]
        self._places = [*_places(metrics)]
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._states: list[list[Tensor]] = [[] for _ in self._places]

    def batch(self, source: int | None, loss: Tensor, weight: float, *, idle: bool = False) -> None:
        """As :meth:`Together.batch`."""
        if source is None:
            if idle:
                emptied(self._metrics)
                for kept in self._kept:
                    kept.calls.clear()
            return
        self._sources.append(source)
        self._losses.append(loss.detach())
        self._weights.append(weight)
        for place, taken in zip(self._places, self._states, strict=True):
            state = _state(place)
            taken.append(state.clone())
            state.zero_()

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Return loss and weight of each source over all ranks (``each``: micro-batches of a rank at most). The metrics
        get their sums on rank 0 only. Collective."""
        wide, device = torch.float64, self._device
        mine = torch.zeros(each, 3, dtype=wide, device=device)
        mine[:, 0] = -1.0
        if self._losses:
            known = torch.tensor([self._sources, self._weights], dtype=wide, device=device)
            mine[: len(self._losses)] = torch.stack([known[0], torch.stack(self._losses).to(wide), known[1]], dim=1)
        rows = accelerator.gather(mine[None]).view(-1, 3).tolist()  # ranks have neighbouring micro-batches: in order
        here = [[row for row in rows if row[0] == source] for source in range(self._number)]
        for place, taken in zip(self._places, self._states, strict=True):
            state = _state(place)
            padded = torch.stack([*taken, *[torch.zeros_like(state)] * (each - len(taken))])
            total = tree_sum(accelerator.gather(padded[None]).view(-1, *state.shape))
            state.copy_(total if accelerator.is_main_process else torch.zeros_like(total))
        for kept in self._kept:
            kept.give(self._device)
        totals, weights = ([rounded_sum(row[place] for row in part) for part in here] for place in (1, 2))
        return totals, weights


def emptied(metrics: Any) -> None:
    """Set all states of a task's metrics to those before the first sample; lists keep the types of their tensors."""
    for state in metrics.sums() if hasattr(metrics, "sums") else ():
        state.zero_()
    for metric in _metrics(metrics):
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            if isinstance(state, list):
                setattr(metric, name, [part[:0] for part in state])
            else:
                state.copy_(default)


def _places(metrics: Any) -> Iterator[tuple[Any, str | int]]:
    """Where floating sums stand: an object and the name or number of its state."""
    if metrics is None:
        return
    if hasattr(metrics, "sums"):
        yield from ((metrics, place) for place, state in enumerate(metrics.sums()) if state.is_floating_point())
        return
    for metric in _metrics(metrics):
        for name, reduction in metric._reductions.items() if _adds_up(metric) else ():
            state = getattr(metric, name)
            if reduction.__name__ == "dim_zero_sum" and torch.is_tensor(state) and state.is_floating_point():
                yield metric, name


def _metrics(metrics: Any) -> Iterator[Any]:
    """Those of a torchmetrics collection, the ones inside of wrappers too."""
    if metrics is None or hasattr(metrics, "sums"):
        return
    for whole in metrics.values():
        yield from (metric for metric in whole.modules() if hasattr(metric, "_reductions"))


def _adds_up(metric: Any) -> bool:
    """Whether the states of ranks come together as those of one would be."""
    return all(getattr(reduction, "__name__", None) in _EXACT for reduction in metric._reductions.values())


class _Kept:
    """What a metric is given, kept until all ranks' can be given to it in order."""

    def __init__(self, metric: Any) -> None:
        self._metric, self._update = metric, metric.update
        self.calls: list[Any] = []
        metric.update = self

    def __call__(self, *given: Any, **named: Any) -> None:
        self.calls.append(_moved((given, named), torch.device("cpu")))

    def give(self, device: torch.device) -> None:
        from accelerate.utils import gather_object

        self._metric.distributed_available_fn = lambda: False  # it has all
        for given, named in gather_object(self.calls):
            self._update(*_moved(given, device), **_moved(named, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _moved(inside, device) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(inside, device) for inside in value]
    return value.detach().to(device) if torch.is_tensor(value) else value


def _state(place: tuple[Any, str | int]) -> Tensor:
    metrics, name = place
    state: Tensor = metrics.sums()[name] if isinstance(name, int) else getattr(metrics, name)
    return state
