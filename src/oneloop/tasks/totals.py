"""Losses and weights of an evaluation, summed as they come, or in one order however many ranks share them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_EXACT = {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}
"""reductions of torchmetrics that the number of ranks does not change, but for sums of floating numbers"""


class Together:
    """Summed as they come.

    Args:
        sources: how many there are, each with sums of its own.
        device: of the evaluation.
        metrics: a task's; they sum by themselves.
    """

    def __init__(self, sources: int, device: torch.device, metrics: Any = None) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(sources, dtype=wide, device=device)
        self._weights = [0.0] * sources

    def batch(self, source: int, loss: Tensor, weight: float) -> None:
        """Takes in a micro-batch."""
        self._totals[source] += loss
        self._weights[source] += weight

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Loss and weight of each source over all ranks. Every rank must get here."""
        weights = torch.tensor(self._weights, dtype=self._totals.dtype, device=self._totals.device)
        totals, everywhere = accelerator.reduce(torch.stack([self._totals, weights]), "sum").tolist()
        return totals, everywhere


class Apart:
    """Losses, weights and floating sums of metrics, one for each micro-batch.

    Args:
        sources: how many there are, each with sums of its own.
        device: of the evaluation.
        metrics: a task's; its floating sums are emptied after each micro-batch (those of whole numbers are exact).

    Raises:
        ValueError: the state of a torchmetrics metric is no sum, extreme or list.
    """

    def __init__(self, sources: int, device: torch.device, metrics: Any = None) -> None:
        self._number, self._device = sources, device
        self._places = [*_places(metrics)]
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self._states: list[list[Tensor]] = [[] for _ in self._places]

    def batch(self, source: int, loss: Tensor, weight: float) -> None:
        """Takes in a micro-batch, with which the metrics were updated."""
        self._sources.append(source)
        self._losses.append(loss.detach())
        self._weights.append(weight)
        for place, taken in zip(self._places, self._states, strict=True):
            state = _state(place)
            taken.append(state.clone())
            state.zero_()

    def summed(self, accelerator: Any, *, each: int) -> tuple[list[float], list[float]]:
        """Loss and weight of each source over all ranks. The metrics get their sums, on the main process alone: what
        adds the others' adds nothing. Every rank must get here.

        Args:
            accelerator: its ranks have evaluated.
            each: micro-batches of a rank at most.
        """
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
            total = _tree(accelerator.gather(padded[None]).view(-1, *state.shape))
            state.copy_(total if accelerator.is_main_process else torch.zeros_like(total))
        totals, weights = ([math.fsum(row[place] for row in part) for part in here] for place in (1, 2))
        return totals, weights


def _tree(parts: Tensor) -> Tensor:
    """Their sum over the first dimension, neighbours first; zeros at the end change nothing of it."""
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def _places(metrics: Any) -> Iterator[tuple[Any, str | int]]:
    """Where floating sums stand: an object and the name or number of its state."""
    if metrics is None:
        return
    if hasattr(metrics, "sums"):
        yield from ((metrics, place) for place, state in enumerate(metrics.sums()) if state.is_floating_point())
        return
    metrics._enable_compute_groups = False  # metrics that share a state would each empty it
    for whole in metrics.values():
        for metric in whole.modules():
            for name, reduction in getattr(metric, "_reductions", {}).items():
                if getattr(reduction, "__name__", None) not in _EXACT:
                    raise ValueError(
                        f"batch.grain: the state {name} of the metric {type(metric).__name__} is put together from the"
                        " ranks in a way that depends on how many there are; leave it out, or measure it afterwards"
                        " (oneloop evaluate)"
                    )
                state = getattr(metric, name)
                if reduction.__name__ == "dim_zero_sum" and torch.is_tensor(state) and state.is_floating_point():
                    yield metric, name


def _state(place: tuple[Any, str | int]) -> Tensor:
    metrics, name = place
    state: Tensor = metrics.sums()[name] if isinstance(name, int) else getattr(metrics, name)
    return state
