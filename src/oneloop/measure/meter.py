"""Metrics of the training steps, summed on the device and read at log steps."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.memory import peak_memory
from oneloop.basics.wide_sums import on_host, wide_dtype
from oneloop.measure.clock import Clock
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


class Sums:
    """Sums over one step of the loss and of named metrics, weighted by the micro-batch.

    Args:
        names: Names of the metrics.
        apart: Keep one row per micro-batch, so that the order of the sum is the same under every
            parallel layout.
    """

    def __init__(self, names: Sequence[str] = (), *, apart: bool = False) -> None:
        self._names = names
        self._join = torch.stack if apart else sum
        self._losses: list[Tensor] = []
        self._rows: list[Tensor] = []  # named metrics of each micro-batch, times its weight

    def add(self, loss: Tensor, outputs: Mapping[str, Tensor], weight: float) -> None:
        """Add one micro-batch; no host sync, and no device work except for named metrics.

        If a metric is missing in any micro-batch, its mean is NaN.

        Args:
            loss: Summed loss of the micro-batch, 0-dim.
            outputs: Its other metrics by name, 0-dim means.
            weight: Its weight, by which these are multiplied.
        """
        loss = loss.detach()
        self._losses.append(loss)
        if self._names:
            # Weight the named metrics in the widest dtype of the device.
            wide = wide_dtype(loss.device)
            missing = loss.new_full((), torch.nan)
            means = [outputs.get(name, missing).detach().to(wide) for name in self._names]
            self._rows.append(torch.stack(means) * weight)

    @property
    def loss(self) -> Any:
        """The summed loss, 0-dim; with ``apart``, shape (micro-batches,)."""
        return self._join(self._losses)

    @property
    def metrics(self) -> Any:
        """The weighted sums, shape (names,); with ``apart``, (micro-batches, names); or None."""
        return self._join(self._rows) if self._names else None


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
        leaves: With batch.grain, the indices of this rank's leaves in the step; makes loss, norm
            and named metrics bit-identical under every parallel layout.
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
        leaves: Sequence[int] = (),
    ) -> None:
        device = accelerator.device
        self._accelerator = accelerator
        self._flops = flops
        self._peak = peak
        self._tokens = tokens
        self._names = tuple(metrics)
        self._update = UpdateRatio(parameters)

        # Sums since the last read, on the host: a row for this rank, or for each of its leaves. The
        # first column is the loss, the others are the named metrics.
        self._leaves = [*leaves] or [accelerator.process_index]
        self._sums = np.zeros((len(self._leaves), 1 + len(self._names)))
        self._steps: list[Sequence[Tensor]] = []  # not yet in the sums: their losses and metrics
        self._norm = torch.zeros((), device=device)
        self.clock = Clock(device)
        self._begin(0.0)

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
        """Add one step; no host sync, and no device work.

        Args:
            loss: This rank's summed loss, 0-dim, kept without a copy; with leaves, shape (leaves,).
            weight: Total weight of the global batch.
            samples: Samples of the global batch.
            norm: Global gradient norm before clipping, 0-dim.
            metrics: This rank's weighted sums, shape (names,); with leaves, (leaves, names).
        """
        self._steps.append((loss,) if metrics is None else (loss, metrics))
        self._weight += weight
        self._timed_weight += weight
        self._timed_samples += samples
        self._norm = norm

    def read(self) -> dict[str, float]:
        """Return the metrics since the last read; one collective, and host syncs.

        Collective: call on every rank.

        Raises:
            RuntimeError: there was no step since the last read.
        """
        if not self._weight:
            raise RuntimeError("there is nothing to read: call step() before each read()")
        self._add_steps()
        last = on_host(torch.cat([self._norm[None], self._update.values(self._norm)]))
        gib = peak_memory(self._norm.device) / 2**30
        mine = np.concatenate([last.numpy(), [gib], self._sums.ravel()])
        ranks = self._gathered(mine[None], [self._accelerator.process_index])
        norms, moved, sizes, memory, *columns = zip(*ranks, strict=True)

        # Means over the global batches since the last read. Round once, so that a sum does not
        # depend on the order of ranks and leaves.
        metrics = {}
        names = ("loss", *self._names)
        for index, name in enumerate(names):
            total = rounded_sum(chain(*columns[index :: len(names)]))
            metrics[f"train/{name}"] = total / self._weight

        # Of the last step.
        metrics["train/grad_norm"] = norms[0]
        if any(sizes):
            metrics["train/update_ratio"] = (sum(moved) / sum(sizes)) ** 0.5

        # Speed and the device.
        times = self.clock.read()
        seconds = times.pop("seconds")
        metrics["train/samples_per_second"] = self._timed_samples / seconds
        if self._tokens:
            metrics["speed/tokens_per_second"] = self._timed_weight / seconds
        if self._flops and self._peak:
            achieved = self._flops * self._timed_samples / seconds
            metrics["speed/mfu"] = achieved / (self._peak * len(ranks))
        metrics["memory/peak_gib"] = max(memory)
        metrics |= times

        self._sums[:] = 0.0
        self._begin(0.0)
        return metrics

    def _add_steps(self) -> None:
        """Add the steps to the sums, one by one. Host sync."""
        parts = (self._sums[:, :1], self._sums[:, 1:])
        for part, tensors in zip(parts, zip(*self._steps, strict=True), strict=False):
            steps = on_host(torch.stack(tensors)).numpy()
            for values in steps.reshape(-1, *part.shape):
                part += values
        self._steps = []

    def _gathered(self, rows: NDArray[np.float64], indices: Sequence[int]) -> list[list[float]]:
        """Gather rows from all ranks, in the order of their indices. Collective."""
        ranks = self._accelerator.num_processes
        slots: Any = np.zeros((ranks * len(rows), rows.shape[1]))
        slots[indices] = rows
        if ranks > 1:
            shared = torch.from_numpy(slots).to(self._accelerator.device)
            slots = self._accelerator.reduce(shared, "sum")
        return list(slots.tolist())

    def _begin(self, weight: float) -> None:
        """Set the weight of the sums, and start the clock: a checkpoint holds no times."""
        self._weight = weight
        self._steps = []
        # Since the clock started.
        self._timed_weight = 0.0
        self._timed_samples = 0
        self.clock.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last read. Collective, with host syncs.

        There is a row for each rank; with leaves, one for each leaf in the order of the step.
        """
        self._add_steps()
        return {"sums": self._gathered(self._sums, self._leaves), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums, bit-identically on the same number of ranks, and with leaves on any.

        On another number of ranks, rank 0 gets the totals. With other metrics, begin at zero."""
        rows = np.array(state["sums"])
        self._sums[:] = 0.0
        if rows.shape[1:] != self._sums.shape[1:]:
            self._begin(0.0)
            return
        if len(rows) == self._accelerator.num_processes * len(self._leaves):
            self._sums[:] = rows[self._leaves]
        elif self._accelerator.is_main_process:
            self._sums[0] = [rounded_sum(column) for column in rows.T]
        self._begin(float(state["weight"]))
