"""Metrics of the training steps, summed on the device and read at log steps."""

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
    """Sums over one step of the loss and of named metrics (0-dim outputs), weighted by the
    micro-batch.

    ``apart`` keeps one row per micro-batch, so that the order of the sum is the same under every
    parallel layout."""

    def __init__(self, names: Sequence[str] = (), *, apart: bool = False) -> None:
        self._names, self._apart = names, apart
        self.loss: Any = 0.0  # 0-dim; with ``apart``, shape (micro-batches,)
        self.metrics: Tensor | None = None  # shape (names,); with ``apart``, (micro-batches, names)

    def add(self, loss: Tensor, outputs: Mapping[str, Tensor], weight: float) -> None:
        """Add one micro-batch; no host sync, and no device work except the sums.

        If a metric is missing in any micro-batch, its mean is NaN."""
        if self._apart:
            self.loss = _with(self.loss, loss.detach())
        else:
            self.loss = self.loss + loss.detach()
        if self._names:
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            nothing = loss.detach().new_full((), torch.nan)
            mine = (
                torch.stack([outputs.get(name, nothing).detach().to(wide) for name in self._names])
                * weight
            )
            if self._apart:
                self.metrics = _with(self.metrics, mine)
            else:
                self.metrics = mine if self.metrics is None else self.metrics + mine


def _with(rows: Any, row: Tensor) -> Tensor:
    return torch.cat([rows, row[None]]) if torch.is_tensor(rows) else row[None]


_OWN = ("loss", "grad_norm", "lr", "epoch", "samples_per_second", "update_ratio", "noise_scale")
OWN_METRICS = frozenset(f"train/{name}" for name in _OWN)  # training metrics of every run


class Meter:
    """Metrics since the last :meth:`read`: loss, throughput, gradient norm, update ratio, memory
    and time shares.

    Args: ``accelerator``: its ranks share the metrics. ``parameters``: parameters whose update
        ratio is measured.
    ``flops``: floating-point operations of training on one sample (0: unknown). ``peak``: peak
    FLOP/s of one device (0: unknown). ``tokens``: whether the weight counts tokens. ``metrics``:
    names of the metrics that :meth:`step` gets; their weighted means are logged as train/NAME.
    ``leaf``: with batch.grain, maps (rank, n) to the index of the rank's n-th leaf in the step;
    makes metrics bit-identical under every parallel layout. ``leaves``: leaves per step on each
    rank.
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
        self._chunks: list[Tensor] = []  # each holds 1024 earlier losses in one tensor
        self._loss = 0.0  # this rank's loss from the last read to the last save
        self._idle = 0.0  # seconds per step without data, before the last read
        self.own: list[list[float]] = []  # at the last read: for each rank what it measured alone
        self._norm = torch.zeros((), device=device)
        self._names = tuple(metrics)
        self._leaf, self._leaves = leaf, leaves
        # leaves include the loss
        shape = (len(self._names),) if leaf is None else (leaves, 1 + len(self._names))
        self._metrics = torch.zeros(shape, dtype=self._wide, device=device)
        self._weight = 0.0
        # since the clock started: a checkpoint holds no times
        self._timed_weight, self._timed_samples = 0.0, 0
        self._update = UpdateRatio(parameters) if leaf is None else ExactUpdateRatio(parameters)

    def before_update(self, measured: bool = True) -> None:
        """Call before an update of the weights; if ``measured``, measure its update ratio."""
        if measured:
            self._update.before()

    def step(
        self,
        *,
        loss: Tensor,
        weight: float,
        samples: int,
        norm: Tensor,
        metrics: Tensor | None = None,
    ) -> None:
        """Add one step; no host sync, and no device work without named metrics.

        Args: ``loss``: this rank's summed loss, 0-dim, kept without a copy; with leaves, shape
        (leaves,). ``weight``: total weight of the global batch. ``samples``: samples of the global
        batch. ``norm``: global gradient norm before clipping. ``metrics``: this rank's weighted
        sums, shape (names,); with leaves, (leaves, names).
        """
        if self._leaf is not None:
            self._metrics += torch.cat(
                [loss[:, None], *(() if metrics is None else [metrics])], dim=1
            )
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

    def read(self, own: Sequence[float] = (0.0,)) -> dict[str, float]:
        """Return the metrics since the last read; one all-gather and one host sync. Collective:
        call on every rank.

        ``own`` is what this rank measured alone: first, how long it waited for data per step, in
        seconds. The values of all ranks are then in :attr:`own`. (Only a wait that also left the
        device idle counts.)"""
        update = self._update.values(self._norm)
        values = [self._norm, *update, *self._metrics.flatten()]
        host = [
            float(peak_memory()),
            utilisation(self._norm.device),
            min(own[0], self._idle),
            *own[1:],
        ]
        losses, others = self._gathered(values, host)
        times = self.clock.read()
        seconds = times.pop("seconds")
        self.own = [row[-len(own) :] for row in others]
        norms, *rest, memory, busy = zip(*(row[: -len(own)] for row in others), strict=True)
        self._idle = times["share/data"] * times.get("speed/step_seconds", 0.0)
        loss, *named = self._totals(losses, rest[len(update) :])
        metrics = {"train/loss": loss / self._weight, "train/grad_norm": statistics.fmean(norms)}
        metrics |= {"train/samples_per_second": self._timed_samples / seconds}
        metrics |= {
            f"train/{name}": total / self._weight
            for name, total in zip(self._names, named, strict=True)
        }
        if (ratio := self._update.ratio([*zip(*rest[: len(update)], strict=True)])) is not None:
            metrics["train/update_ratio"] = ratio
        if self._tokens:
            metrics["speed/tokens_per_second"] = self._timed_weight / seconds
        if self._flops and self._peak:
            metrics["speed/mfu"] = (
                self._flops * self._timed_samples / seconds / (self._peak * len(losses))
            )
        if not math.isnan(sum(busy)):
            metrics["device/utilisation"] = statistics.fmean(busy)
        metrics |= {"memory/peak_gib": max(memory) / 2**30, **times}
        self._loss = self._weight = self._timed_weight = 0.0
        self._metrics = torch.zeros_like(self._metrics)
        self._timed_samples = 0
        return metrics

    def _totals(self, losses: Sequence[float], metrics: Sequence[Sequence[float]]) -> list[float]:
        """Sum the loss and the other metrics over the ranks."""
        if self._leaf is None:
            return [sum(losses), *(sum(values) for values in metrics)]
        own = 1 + len(self._names)
        return [
            rounded_sum(value for row in metrics[name::own] for value in row) for name in range(own)
        ]

    def _gathered(
        self, values: list[Tensor], host: list[float]
    ) -> tuple[list[float], list[list[float]]]:
        """Gather each rank's summed loss, and its other metrics: 0-dim tensors ``values`` and
        numbers ``host``.

        The host adds the losses one by one, so that their sum does not depend on when the run
        saved."""
        single = torch.stack([*self._losses, *values])
        mine = torch.cat([*self._chunks, single]) if self._chunks else single
        self._losses, self._chunks = [], []
        if self._accelerator.num_processes > 1:
            known = torch.tensor([self._loss, *host], dtype=self._wide, device=mine.device)
            rows = self._accelerator.gather(torch.cat([known, mine])[None]).tolist()  # host sync
        else:
            rows = [[self._loss, *host, *mine.tolist()]]  # host sync
        first, last = 1 + len(host), len(rows[0]) - len(values)
        return (
            [_in_order([row[0], *row[first:last]]) for row in rows],
            [[*row[last:], *row[1:first]] for row in rows],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last read, per rank. Collective; one host sync."""
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
        """Restore the sums, bit-identically on the same number of ranks; otherwise rank 0 gets the
        totals."""
        if self._leaf is not None:
            self._load_leaves(state)
            return
        losses, rank = state.get("losses", []), self._accelerator.process_index
        self._losses, self._chunks = [], []
        self._loss = (
            losses[rank]
            if len(losses) == self._accelerator.num_processes
            else sum(losses)
            if rank == 0
            else 0.0
        )
        self._weight, self._timed_weight, self._timed_samples = (
            state["weight"] if losses else 0.0,
            0.0,
            0,
        )
        rows = torch.tensor(state.get("figures", []), dtype=self._wide, device=self._metrics.device)
        if len(rows) and rows.shape[1] == len(self._names):  # the same number of metrics
            self._metrics = (
                rows[rank]
                if len(rows) == self._accelerator.num_processes
                else rows.sum(0) * (rank == 0)
            )
        else:
            self._metrics = torch.zeros_like(self._metrics)
        self.clock.restart()

    def _load_leaves(self, state: dict[str, Any]) -> None:
        rows = torch.tensor(state.get("leaves", []), dtype=self._wide, device=self._metrics.device)
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        # else from zero
        same = rows.ndim == 2 and rows.shape == (ranks * self._leaves, self._metrics.shape[1])
        assert self._leaf is not None
        mine = [self._leaf(rank, leaf) for leaf in range(self._leaves)]
        self._metrics = rows[mine] if same else torch.zeros_like(self._metrics)
        self._weight, self._timed_weight, self._timed_samples = (
            state["weight"] if same else 0.0,
            0.0,
            0,
        )
        self.clock.restart()


def _in_order(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
