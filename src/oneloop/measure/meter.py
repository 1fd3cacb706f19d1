"""What a run does between two log steps, kept on the device; reading it is the one visible host sync."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from oneloop.basics.memory import peak_memory
from oneloop.basics.tensors import as_real, local
from oneloop.measure.clock import Clock
from oneloop.measure.utilisation import utilisation

OWN_FIGURES = frozenset(
    f"train/{name}"
    for name in ("loss", "grad_norm", "lr", "epoch", "samples_per_second", "update_ratio", "noise_scale")
)
"""figures of training that every run has"""
_SAMPLED = 1 << 13
"""weights at most whose update is measured; of larger models a sample, which tells the ratio to about 1 %"""
_RUN = 64
"""weights that lie side by side are taken together: memory is read by lines"""


class Meter:
    """What happened since the last :meth:`read`: loss, throughput, gradient norm, update, memory, and where time went.

    Args:
        accelerator: its ranks share the figures.
        parameters: whose update is measured against their size.
        flops: floating-point operations of training on one sample (0: not known).
        peak: those per second that one device can make (0: not known).
        tokens: the weight counts tokens.
        figures: names of more that :meth:`step` is given; their weighted means are train/NAME.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parameters: Iterable[Tensor] = (),
        *,
        flops: float = 0.0,
        peak: float = 0.0,
        tokens: bool = False,
        figures: Sequence[str] = (),
    ) -> None:
        self._accelerator = accelerator
        self._flops, self._peak, self._tokens = flops, peak, tokens
        device = accelerator.device
        self.clock = Clock(device)
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._losses: list[Tensor] = []
        self._chunks: list[Tensor] = []
        """of very many losses a thousand at a time are put together"""
        self._loss = 0.0
        """this rank's sum up to the last save, where that was after the last read"""
        self._norm = torch.zeros((), device=device)
        self._names = tuple(figures)
        self._figures = torch.zeros(len(self._names), dtype=self._wide, device=device)
        self._weight = 0.0
        self._timed_weight, self._timed_samples = 0.0, 0
        """since the clock began: a resume brings no time with it"""
        self._update = UpdateRatio(parameters)

    def before_update(self, measured: bool = True) -> None:
        """Weights are about to be updated; whether that is to be measured."""
        if measured:
            self._update.before()

    def step(self, *, loss: Tensor, weight: float, samples: int, norm: Tensor, figures: Tensor | None = None) -> None:
        """Takes in one step; no host sync, and no work for the device where there are no more figures.

        Args:
            loss: this rank's summed loss, 0-dim; is kept as it is.
            weight: of the global batch.
            samples: of the global batch.
            norm: global gradient norm before clipping.
            figures: this rank's sums of the named ones, each micro-batch's times its weight.
        """
        self._losses.append(loss)
        if figures is not None:
            self._figures += figures
        if len(self._losses) == 1024:
            self._chunks.append(torch.stack(self._losses))
            self._losses = []
        self._weight += weight
        self._timed_weight += weight
        self._timed_samples += samples
        self._norm = norm

    def read(self) -> dict[str, float]:
        """The figures since the last read; one all-gather and one host sync. Every rank must get here."""
        told = [self._norm, *self._update.squares(self._norm), *self._figures]
        losses, others = self._gathered(told, [float(peak_memory()), utilisation(self._norm.device)])
        times = self.clock.read()
        seconds = times.pop("seconds")
        norms, moves, sizes, *named, memory, busy = zip(*others, strict=True)
        figures = {
            "train/loss": sum(losses) / self._weight,
            "train/grad_norm": statistics.fmean(norms),
            "train/samples_per_second": self._timed_samples / seconds,
        }
        figures |= {f"train/{name}": sum(parts) / self._weight for name, parts in zip(self._names, named, strict=True)}
        if sum(sizes):
            figures["train/update_ratio"] = (sum(moves) / sum(sizes)) ** 0.5
        if self._tokens:
            figures["speed/tokens_per_second"] = self._timed_weight / seconds
        if self._flops and self._peak:
            figures["speed/mfu"] = self._flops * self._timed_samples / seconds / (self._peak * len(losses))
        if not math.isnan(sum(busy)):
            figures["device/utilisation"] = statistics.fmean(busy)
        figures |= {"memory/peak_gib": max(memory) / 2**30, **times}
        self._loss = self._weight = self._timed_weight = 0.0
        self._figures = torch.zeros_like(self._figures)
        self._timed_samples = 0
        return figures

    def _gathered(self, told: list[Tensor], host: list[float]) -> tuple[list[float], list[list[float]]]:
        """Every rank's summed loss, and its other figures: 0-dim tensors, and what the host knows.

        The losses are added one by one, on the host: so their sum does not depend on where a save came between.
        """
        single = torch.stack([*self._losses, *told])
        mine = torch.cat([*self._chunks, single]) if self._chunks else single
        self._losses, self._chunks = [], []
        if self._accelerator.num_processes > 1:
            known = torch.tensor([self._loss, *host], dtype=self._wide, device=mine.device)
            rows = self._accelerator.gather(torch.cat([known, mine])[None]).tolist()  # host sync
        else:
            rows = [[self._loss, *host, *mine.tolist()]]  # host sync
        first, last = 1 + len(host), len(rows[0]) - len(told)
        return ([_in_order([row[0], *row[first:last]]) for row in rows], [[*row[last:], *row[1:first]] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """What was summed since the last read, each rank's loss by itself. Host sync; every rank must get here."""
        losses, others = self._gathered([self._norm, *self._figures], [])
        self._loss = losses[self._accelerator.process_index]
        state = {"losses": losses, "weight": self._weight}
        return {**state, "figures": [row[1:] for row in others]} if self._names else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with those sums: to the bit where the number of ranks is the same, else rank 0 takes all."""
        losses, rank = state["losses"], self._accelerator.process_index
        self._losses, self._chunks = [], []
        self._loss = (
            losses[rank] if len(losses) == self._accelerator.num_processes else sum(losses) if rank == 0 else 0.0
        )
        self._weight, self._timed_weight, self._timed_samples = state["weight"], 0.0, 0
        rows = torch.tensor(state.get("figures", []), dtype=self._wide, device=self._figures.device)
        if len(rows) and rows.shape[1] == len(self._names):  # of the same figures
            one = rows[rank] if len(rows) == self._accelerator.num_processes else rows.sum(0) * (rank == 0)
            self._figures = one
        else:
            self._figures = torch.zeros_like(self._figures)
        self.clock.restart()


def _in_order(values: list[float]) -> float:
    """Their sum, added from the left: the built-in ``sum`` compensates since Python 3.12, and would add otherwise."""
    total = 0.0
    for value in values:
        total += value
    return total


class UpdateRatio:
    """How large an update is against the weights: |change| / |weights|; about 1e-3 is usual.

    Of models with more than some thousand weights a fixed sample is taken, the same share of each parameter where that
    is possible: each weight of the sample stands for as many of its parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        mine = [_dense(as_real(local(parameter.detach()))) for parameter in parameters]
        stride = max(1, sum(part.numel() for part in mine) // _SAMPLED)
        by_width: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for part in mine:
            if part.numel() and part.is_contiguous():
                width = min(_RUN, part.numel())
                runs = part.view(-1)[: part.numel() // width * width].view(-1, width)[::stride]
                counts = torch.full((runs.numel(),), part.numel() / runs.numel(), device=part.device)
                by_width[width].append((runs, counts))
        self._samples = [_Sample(*map(list, zip(*each, strict=True))) for each in by_width.values()]
        self._begun = False

    def before(self) -> None:
        """Remembers the weights."""
        for sample in self._samples:
            sample.take(1)
        self._begun = True

    def squares(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of the change since :meth:`before` and of the weights then, 0-dim.

        Both are 0 where :meth:`before` was not called, and on a rank that holds no weights.
        """
        each = [sample.squares() for sample in self._samples] if self._begun else []
        self._begun = False
        moved, size = reduce(torch.add, each) if each else like.new_zeros(2)
        return moved, size


def _dense(tensor: Tensor) -> Tensor:
    """The same elements with the dimensions in the order of memory, as channels-last weights are not."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


class _Sample:
    """Runs of one width, out of several parameters, and for how many weights each element stands."""

    def __init__(self, runs: list[Tensor], counts: list[Tensor]) -> None:
        dtype = reduce(torch.promote_types, (run.dtype for run in runs), torch.float32)
        self._runs, self._counts = runs, torch.cat(counts).to(dtype)
        self._pair = self._counts.new_empty(2, self._counts.numel())
        self._rows = [row.view(-1, runs[0].shape[1]) for row in self._pair]
        """the weights afterwards, and those before"""

    def take(self, row: int) -> None:
        torch.cat(self._runs, out=self._rows[row])

    def squares(self) -> Tensor:
        """Squared norms of the change and of the weights before, of shape (2,)."""
        self.take(0)
        self._rows[0].sub_(self._rows[1])
        return self._pair.square_().mv(self._counts)
