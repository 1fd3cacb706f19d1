"""Metrics of the training steps, summed on the device and read at a log line."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.memory import peak_memory
from oneloop.measure.clock import Clock
from oneloop.measure.flops import utilisation
from oneloop.measure.update_ratio import ExactUpdateRatio, UpdateRatio


class Sums:
    """The summed loss, and the sums of named metrics (0-dim outputs), each times the weight of its micro-batch.

    ``apart`` keeps the sums of each micro-batch, to be added in an order that no split changes.
    """

    def __init__(self, names: Sequence[str] = (), *, apart: bool = False) -> None:
        self._names, self._apart = names, apart
        self.loss: Any = 0.0
        """0-dim; apart (micro-batches,)"""
        self.metrics: Tensor | None = None
        """one value for each name; apart (micro-batches, names)"""

    def add(self, loss: Tensor, outputs: Mapping[str, Tensor], weight: float) -> None:
        """Takes in one micro-batch; no host sync, and no work for the device beyond the sums.

        The mean of a metric that is missing in one of them is NaN.
        """
        if self._apart:
            self.loss = _with(self.loss, loss.detach())
        else:
            self.loss = self.loss + loss.detach()
        if self._names:
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            nothing = loss.detach().new_full((), torch.nan)
            mine = torch.stack([outputs.get(name, nothing).detach().to(wide) for name in self._names]) * weight
            if self._apart:
                self.metrics = _with(self.metrics, mine)
            else:
                self.metrics = mine if self.metrics is None else self.metrics + mine


def _with(rows: Any, row: Tensor) -> Tensor:
    return torch.cat([rows, row[None]]) if torch.is_tensor(rows) else row[None]


_OWN = ("loss", "grad_norm", "lr", "epoch", "samples_per_second", "update_ratio", "noise_scale")
OWN_FIGURES = frozenset(f"train/{name}" for name in _OWN)
"""metrics of training that every run has"""


class Meter:
    """What happened since the last :meth:`read`: loss, throughput, gradient norm, update, memory, and where time went.

    Args:
        accelerator: its ranks share the metrics.
        parameters: whose update is measured against their size.
        flops: floating-point operations of training on one sample (0: not known).
        peak: those per second that one device can make (0: not known).
        tokens: the weight counts tokens.
        metrics: names of more that :meth:`step` is given; their weighted means are train/NAME.
        leaf: which of a step's leaves it is that a rank takes as its n-th: what is told is then the same bits for every
            split.
        leaves: of a step on each rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parameters: Iterable[Tensor] = (),
        *,
        flops: float = 0.0,
        peak: float = 0.0,
        tokens: bool = False,
        metrics: Sequence[str] = (),
        leaf: Callable[[int, int], int] | None = None,
        leaves: int = 1,
    ) -> None:
        self._accelerator = accelerator
        self._flops, self._peak, self._tokens = flops, peak, tokens
        device = accelerator.device
        self.clock = Clock(device)
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._losses: list[Tensor] = []
        self._chunks: list[Tensor] = []  # of very many losses a thousand at a time are put together
        self._loss = 0.0  # this rank's sum up to the last save, where that was after the last read
        self._norm = torch.zeros((), device=device)
        self._names = tuple(metrics)
        self._leaf, self._leaves = leaf, leaves
        shape = (len(self._names),) if leaf is None else (leaves, 1 + len(self._names))  # of a leaf its loss too
        self._metrics = torch.zeros(shape, dtype=self._wide, device=device)
        self._weight = 0.0
        self._timed_weight, self._timed_samples = 0.0, 0  # since the clock began: a resume brings no time with it
        self._update = UpdateRatio(parameters) if leaf is None else ExactUpdateRatio(parameters)

    def before_update(self, measured: bool = True) -> None:
        """Weights are about to be updated; whether that is to be measured."""
        if measured:
            self._update.before()

    def step(self, *, loss: Tensor, weight: float, samples: int, norm: Tensor, metrics: Tensor | None = None) -> None:
        """Takes in one step; no host sync, and no work for the device where there are no more metrics.

        Args:
            loss: this rank's summed loss, 0-dim; is kept as it is. With leaves theirs, (leaves,); so the metrics.
            weight: of the global batch.
            samples: of the global batch.
            norm: global gradient norm before clipping.
            metrics: this rank's sums of the named ones, each micro-batch's times its weight.
        """
        if self._leaf is not None:
            self._metrics += torch.cat([loss[:, None], *(() if metrics is None else [metrics])], dim=1)
        else:
            self._losses.append(loss)
            if metrics is not None:
                self._metrics += metrics
        if len(self._losses) == 1024:
            self._chunks.append(torch.stack(self._losses))
            self._losses = []
        self._weight += weight
        self._timed_weight += weight
        self._timed_samples += samples
        self._norm = norm

    def read(self) -> dict[str, float]:
        """The metrics since the last read; one all-gather and one host sync. Every rank must get here."""
        update = self._update.values(self._norm)
        values = [self._norm, *update, *self._metrics.flatten()]
        losses, others = self._gathered(values, [float(peak_memory()), utilisation(self._norm.device)])
        times = self.clock.read()
        seconds = times.pop("seconds")
        norms, *rest, memory, busy = zip(*others, strict=True)
        loss, *named = self._totals(losses, rest[len(update) :])
        metrics = {"train/loss": loss / self._weight, "train/grad_norm": statistics.fmean(norms)}
        metrics |= {"train/samples_per_second": self._timed_samples / seconds}
        metrics |= {f"train/{name}": total / self._weight for name, total in zip(self._names, named, strict=True)}
        if (ratio := self._update.ratio([*zip(*rest[: len(update)], strict=True)])) is not None:
            metrics["train/update_ratio"] = ratio
        if self._tokens:
            metrics["speed/tokens_per_second"] = self._timed_weight / seconds
        if self._flops and self._peak:
            metrics["speed/mfu"] = self._flops * self._timed_samples / seconds / (self._peak * len(losses))
        if not math.isnan(sum(busy)):
            metrics["device/utilisation"] = statistics.fmean(busy)
        metrics |= {"memory/peak_gib": max(memory) / 2**30, **times}
        self._loss = self._weight = self._timed_weight = 0.0
        self._metrics = torch.zeros_like(self._metrics)
        self._timed_samples = 0
        return metrics

    def _totals(self, losses: Sequence[float], metrics: Sequence[Sequence[float]]) -> list[float]:
        """The loss of all ranks and the other metrics, by the losses and metrics of each."""
        if self._leaf is None:
            return [sum(losses), *(sum(parts) for parts in metrics)]
        own = 1 + len(self._names)
        return [rounded_sum(value for row in metrics[name::own] for value in row) for name in range(own)]

    def _gathered(self, values: list[Tensor], host: list[float]) -> tuple[list[float], list[list[float]]]:
        """Every rank's summed loss, and its other metrics: 0-dim tensors, and what the host knows.

        The losses are added one by one, on the host: so their sum does not depend on where a save came between.
        """
        single = torch.stack([*self._losses, *values])
        mine = torch.cat([*self._chunks, single]) if self._chunks else single
        self._losses, self._chunks = [], []
        if self._accelerator.num_processes > 1:
            known = torch.tensor([self._loss, *host], dtype=self._wide, device=mine.device)
            rows = self._accelerator.gather(torch.cat([known, mine])[None]).tolist()  # host sync
        else:
            rows = [[self._loss, *host, *mine.tolist()]]  # host sync
        first, last = 1 + len(host), len(rows[0]) - len(values)
        return ([_in_order([row[0], *row[first:last]]) for row in rows], [[*row[last:], *row[1:first]] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """What was summed since the last read, each rank's loss by itself. Host sync; every rank must get here."""
        losses, others = self._gathered([self._norm, *self._metrics.flatten()], [])
        if self._leaf is not None:
            own = 1 + len(self._names)
            found = {
                self._leaf(rank, leaf): row[1 + leaf * own :][:own]
                for rank, row in enumerate(others)
                for leaf in range(self._leaves)
            }
            return {"leaves": [found[leaf] for leaf in sorted(found)], "weight": self._weight}
        self._loss = losses[self._accelerator.process_index]
        state = {"losses": losses, "weight": self._weight}
        return {**state, "figures": [row[1:] for row in others]} if self._names else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with those sums: to the bit where the number of ranks is the same, else rank 0 takes all."""
        if self._leaf is not None:
            self._load_leaves(state)
            return
        losses, rank = state.get("losses", []), self._accelerator.process_index
        self._losses, self._chunks = [], []
        self._loss = (
            losses[rank] if len(losses) == self._accelerator.num_processes else sum(losses) if rank == 0 else 0.0
        )
        self._weight, self._timed_weight, self._timed_samples = state["weight"] if losses else 0.0, 0.0, 0
        rows = torch.tensor(state.get("figures", []), dtype=self._wide, device=self._metrics.device)
        if len(rows) and rows.shape[1] == len(self._names):  # of the same metrics
            self._metrics = rows[rank] if len(rows) == self._accelerator.num_processes else rows.sum(0) * (rank == 0)
        else:
            self._metrics = torch.zeros_like(self._metrics)
        self.clock.restart()

    def _load_leaves(self, state: dict[str, Any]) -> None:
        rows = torch.tensor(state.get("leaves", []), dtype=self._wide, device=self._metrics.device)
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        same = rows.ndim == 2 and rows.shape == (ranks * self._leaves, self._metrics.shape[1])  # else it begins anew
        assert self._leaf is not None
        mine = [self._leaf(rank, leaf) for leaf in range(self._leaves)]
        self._metrics = rows[mine] if same else torch.zeros_like(self._metrics)
        self._weight, self._timed_weight, self._timed_samples = state["weight"] if same else 0.0, 0.0, 0
        self.clock.restart()


def _in_order(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
