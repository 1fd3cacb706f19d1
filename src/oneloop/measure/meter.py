"""Metrics of the training steps, summed on the device and read at log steps."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.memory import peak_memory
from oneloop.basics.wide_sums import wide_dtype
from oneloop.measure.clock import Clock
from oneloop.measure.flops import utilisation
from oneloop.measure.update_ratio import UpdateRatio

# Training metrics of every run.
OWN_METRICS = frozenset(
    {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/epoch",
        "train/samples_per_second",
        "train/update_ratio",
        "train/noise_scale",
    }
)
_CHUNK = 1024  # losses that are put into one tensor


class Sums:
    """Sums over one step of the loss and of named metrics, weighted by the micro-batch.

    Args:
        names: Names of the metrics.
        apart: Keep one row per micro-batch, so that the order of the sum is the same under every
            parallel layout.
    """

    def __init__(self, names: Sequence[str] = (), *, apart: bool = False) -> None:
        self._names = names
        self._apart = apart
        self.loss: Any = 0.0  # 0-dim; with ``apart``, shape (micro-batches,)
        self.metrics: Tensor | None = None  # shape (names,); with ``apart``, (micro-batches, names)

    def add(self, loss: Tensor, outputs: Mapping[str, Tensor], weight: float) -> None:
        """Add one micro-batch; no host sync, and no device work except the sums.

        If a metric is missing in any micro-batch, its mean is NaN.

        Args:
            loss: Summed loss of the micro-batch, 0-dim.
            outputs: Its other metrics by name, 0-dim means.
            weight: Its weight, by which these are multiplied.
        """
        loss = loss.detach()
        if self._apart:
            self.loss = _with(self.loss, loss)
        else:
            self.loss = self.loss + loss
        if not self._names:
            return

        # Weight the named metrics in the widest dtype of the device.
        wide = wide_dtype(loss.device)
        missing = loss.new_full((), torch.nan)
        means = [outputs.get(name, missing).detach().to(wide) for name in self._names]
        mine = torch.stack(means) * weight
        if self._apart:
            self.metrics = _with(self.metrics, mine)
        elif self.metrics is None:
            self.metrics = mine
        else:
            self.metrics = self.metrics + mine


def _with(rows: Any, row: Tensor) -> Tensor:
    if torch.is_tensor(rows):
        return torch.cat([rows, row[None]])
    return row[None]


class _Sent(NamedTuple):
    """What one rank sends in a gather."""

    loss: float  # sum since the last read
    device: list[float]  # values that were tensors
    host: list[float]  # values that were numbers


@dataclass
class _Ranks:
    """Metrics of all ranks; each list has one entry per rank."""

    losses: list[float] = field(default_factory=list)  # sums since the last read
    norms: list[float] = field(default_factory=list)  # of the last step's gradients
    updates: list[list[float]] = field(default_factory=list)  # for UpdateRatio.ratio
    # sums of the named metrics; with leaves, for each leaf its loss and its named metrics
    named: list[list[float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # peak, in bytes
    busy: list[float] = field(default_factory=list)  # utilisation of the device; NaN: unknown
    own: list[list[float]] = field(default_factory=list)  # what the rank measured alone


class Meter:
    """Metrics since the last :meth:`read`: loss, speed, gradient norm, update ratio, memory, time.

    Args:
        accelerator: Its ranks share the metrics.
        parameters: Parameters whose update ratio is measured.
        flops: Floating-point operations of training on one sample (0: unknown).
        peak: Peak FLOP/s of one device (0: unknown).
        tokens: Whether the weight counts tokens.
        metrics: Names of the metrics that :meth:`step` gets; their weighted means are logged as
            train/NAME.
        leaf: With batch.grain, maps (rank, n) to the index of the rank's n-th leaf in the step;
            makes loss, norm and named metrics bit-identical under every parallel layout.
        leaves: Leaves per step on each rank.
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
        device = accelerator.device
        self._accelerator = accelerator
        self._wide = wide_dtype(device)
        self._flops = flops
        self._peak = peak
        self._tokens = tokens
        self._names = tuple(metrics)
        self._leaf = leaf
        self._leaves = leaves

        # Losses stay apart until they are read: the host adds them one by one.
        self._losses: list[Tensor] = []
        self._chunks: list[Tensor] = []  # each holds 1024 earlier losses in one tensor
        self._loss = 0.0  # this rank's loss from the last read to the last save
        self._norm = torch.zeros((), device=device)
        self._weight = 0.0

        # With leaves, the loss is the first metric of each leaf.
        shape = (len(self._names),) if leaf is None else (leaves, 1 + len(self._names))
        self._metrics = torch.zeros(shape, dtype=self._wide, device=device)
        self._update = UpdateRatio(parameters)

        # Since the clock started; a checkpoint holds no times.
        self.clock = Clock(device)
        self._timed_weight = 0.0
        self._timed_samples = 0

        # At the last read.
        self._idle = 0.0  # seconds per step without data, before it
        self.own: list[list[float]] = []  # what each rank measured alone

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

        Args:
            loss: This rank's summed loss, 0-dim, kept without a copy; with leaves, shape (leaves,).
            weight: Total weight of the global batch.
            samples: Samples of the global batch.
            norm: Global gradient norm before clipping, 0-dim.
            metrics: This rank's weighted sums, shape (names,); with leaves, (leaves, names).
        """
        if self._leaf is not None:
            columns = [loss[:, None]]
            if metrics is not None:
                columns.append(metrics)
            self._metrics += torch.cat(columns, dim=1)
        else:
            self._losses.append(loss)
            if metrics is not None:
                self._metrics += metrics

        # A long list of tensors would be slow to stack at the read.
        if len(self._losses) == _CHUNK:
            self._chunks.append(torch.stack(self._losses))
            self._losses = []

        self._weight += weight
        self._timed_weight += weight
        self._timed_samples += samples
        self._norm = norm

    def read(self, own: Sequence[float] = (0.0,)) -> dict[str, float]:
        """Return the metrics since the last read; one all-gather and one host sync.

        Collective: call on every rank.

        Args:
            own: What this rank measured alone: first, how long it waited for data per step, in
                seconds. (Only a wait that also left the device idle counts.) The values of all
                ranks are then in :attr:`own`.

        Raises:
            RuntimeError: there was no step since the last read.
        """
        if not self._weight:
            raise RuntimeError("there is nothing to read: call step() before each read()")
        ranks = self._ranks(own)
        times = self.clock.read()
        seconds = times.pop("seconds")
        self.own = ranks.own
        self._idle = times["share/data"] * times.get("speed/step_seconds", 0.0)

        # Means over the global batches since the last read, and the norm of the last step.
        loss, *named = self._totals(ranks)
        metrics = {
            "train/loss": loss / self._weight,
            "train/grad_norm": statistics.fmean(ranks.norms),
            "train/samples_per_second": self._timed_samples / seconds,
        }
        for name, total in zip(self._names, named, strict=True):
            metrics[f"train/{name}"] = total / self._weight
        ratio = self._update.ratio(ranks.updates)
        if ratio is not None:
            metrics["train/update_ratio"] = ratio

        # Speed and the device.
        if self._tokens:
            metrics["speed/tokens_per_second"] = self._timed_weight / seconds
        if self._flops and self._peak:
            achieved = self._flops * self._timed_samples / seconds
            metrics["speed/mfu"] = achieved / (self._peak * len(ranks.losses))
        if not math.isnan(sum(ranks.busy)):
            metrics["device/utilisation"] = statistics.fmean(ranks.busy)
        metrics["memory/peak_gib"] = max(ranks.memory) / 2**30
        metrics |= times

        # Begin anew.
        self._loss = 0.0
        self._weight = 0.0
        self._timed_weight = 0.0
        self._timed_samples = 0
        self._metrics = torch.zeros_like(self._metrics)
        return metrics

    def _ranks(self, own: Sequence[float]) -> _Ranks:
        """Gather the metrics of all ranks. Collective; one host sync."""
        update = self._update.values(self._norm)
        device = [self._norm, *update, *self._metrics.flatten()]
        host = [
            float(peak_memory(self._norm.device)),
            utilisation(self._norm.device),
            min(own[0], self._idle),
            *own[1:],
        ]

        ranks = _Ranks()
        for sent in self._gathered(device, host):
            ranks.losses.append(sent.loss)
            ranks.norms.append(sent.device[0])
            ranks.updates.append(sent.device[1 : 1 + len(update)])
            ranks.named.append(sent.device[1 + len(update) :])
            ranks.memory.append(sent.host[0])
            ranks.busy.append(sent.host[1])
            ranks.own.append(sent.host[2:])
        return ranks

    def _totals(self, ranks: _Ranks) -> list[float]:
        """Return the sums over the ranks of the loss, and of each named metric."""
        columns = [*zip(*ranks.named, strict=True)]  # a column holds one number of each rank
        if self._leaf is None:
            return [sum(ranks.losses), *map(sum, columns)]
        # Round once, so that the sum does not depend on the order of the leaves.
        width = 1 + len(self._names)
        totals = []
        for name in range(width):
            totals.append(rounded_sum(chain(*columns[name::width])))
        return totals

    def _gathered(self, device: list[Tensor], host: list[float]) -> list[_Sent]:
        """Gather each rank's summed loss and other values: 0-dim tensors, and numbers of the host.

        The host adds the losses one by one, so that their sum does not depend on when the run
        saved."""
        mine = torch.stack([*self._losses, *device])
        if self._chunks:
            mine = torch.cat([*self._chunks, mine])
        self._losses = []
        self._chunks = []

        # A row: the loss until the last save, host, the losses since then, device.
        if self._accelerator.num_processes > 1:
            known = torch.tensor([self._loss, *host], dtype=self._wide, device=mine.device)
            rows = self._accelerator.gather(torch.cat([known, mine])[None]).tolist()  # host sync
        else:
            rows = [[self._loss, *host, *mine.tolist()]]  # host sync
        first = 1 + len(host)
        last = len(rows[0]) - len(device)

        found = []
        for row in rows:
            loss = 0.0
            for value in (row[0], *row[first:last]):
                loss += value
            found.append(_Sent(loss, device=row[last:], host=row[1:first]))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last read, per rank. Collective; one host sync."""
        ranks = self._gathered([self._norm, *self._metrics.flatten()], [])
        if self._leaf is not None:
            # Store leaves in the order of the step, which does not depend on the layout.
            width = 1 + len(self._names)
            leaves = {}
            for rank, sent in enumerate(ranks):
                for number in range(self._leaves):
                    begin = 1 + number * width
                    leaves[self._leaf(rank, number)] = sent.device[begin : begin + width]
            return {"leaves": [leaves[leaf] for leaf in sorted(leaves)], "weight": self._weight}

        self._loss = ranks[self._accelerator.process_index].loss
        state: dict[str, Any] = {"losses": [sent.loss for sent in ranks], "weight": self._weight}
        if self._names:
            state["figures"] = [sent.device[1:] for sent in ranks]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums, bit-identically on the same number of ranks.

        On another number of ranks, rank 0 gets the totals."""
        if self._leaf is not None:
            self._load_leaves(self._leaf, state)
            return
        ranks = self._accelerator.num_processes
        rank = self._accelerator.process_index
        losses = state.get("losses", [])
        self._losses = []
        self._chunks = []
        if len(losses) == ranks:
            self._loss = float(losses[rank])
        elif rank == 0:
            self._loss = sum(losses)
        else:
            self._loss = 0.0

        # Named metrics: per rank on the same number of ranks, else in sum on rank 0.
        rows = torch.tensor(state.get("figures", []), dtype=self._wide, device=self._metrics.device)
        if not len(rows) or rows.shape[1] != len(self._names):  # other metrics: begin at zero
            self._metrics = torch.zeros_like(self._metrics)
        elif len(rows) == ranks:
            self._metrics = rows[rank]
        else:
            self._metrics = rows.sum(0) * (rank == 0)
        self._restart(float(state["weight"]) if losses else 0.0)

    def _load_leaves(self, leaf: Callable[[int, int], int], state: dict[str, Any]) -> None:
        rows = torch.tensor(state.get("leaves", []), dtype=self._wide, device=self._metrics.device)
        number = self._accelerator.num_processes * self._leaves
        # Another grain or other metrics: begin at zero.
        if rows.ndim != 2 or rows.shape != (number, self._metrics.shape[1]):
            self._metrics = torch.zeros_like(self._metrics)
            self._restart(0.0)
            return
        rank = self._accelerator.process_index
        mine = [leaf(rank, number) for number in range(self._leaves)]
        self._metrics = rows[mine]
        self._restart(float(state["weight"]))

    def _restart(self, weight: float) -> None:
        """Set the weight since the last read, and start the clock: a checkpoint holds no times."""
        self._weight = weight
        self._timed_weight = 0.0
        self._timed_samples = 0
        self.clock.restart()
