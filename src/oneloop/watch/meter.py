"""What a run does, summed on the device between two log steps; reading it is the one visible host sync."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from oneloop.memory.batch_size import peak_memory
from oneloop.optim.local import local
from oneloop.watch.clock import Clock
from oneloop.watch.utilisation import utilisation

_SAMPLED = 1 << 20
"""weights at most whose update is measured; of larger models every n-th"""


class Meter:
    """What happened since the last :meth:`read`: loss, throughput, gradient norm, update, memory, and where time went.

    Args:
        accelerator: its ranks share the figures.
        parameters: whose update is measured against their size.
        flops: floating-point operations of training on one sample (0: not known).
        peak: those per second that one device can make (0: not known).
        tokens: the weight counts tokens.
    """

    def __init__(self, accelerator: Accelerator, parameters: Iterable[Tensor] = (), *, flops: float = 0.0,
                 peak: float = 0.0, tokens: bool = False) -> None:  # fmt: skip
        self._accelerator = accelerator
        self._flops, self._peak, self._tokens = flops, peak, tokens
        device = accelerator.device
        self.clock = Clock(device)
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=self._wide, device=device)
        self._norm = torch.zeros((), device=device)
        self._weight = 0.0
        self._samples = 0
        self._seconds = 0.0
        self._update = UpdateRatio(parameters)

    def before_update(self) -> None:
        """The coming update is to be measured."""
        self._update.before()

    def step(self, *, loss: Tensor, weight: float, samples: int, norm: Tensor) -> None:
        """Takes in one step; no host sync.

        Args:
            loss: this rank's summed loss, 0-dim.
            weight: of the global batch.
            samples: of the global batch.
            norm: global gradient norm before clipping.
        """
        self._loss += loss
        self._weight += weight
        self._samples += samples
        self._norm = norm

    def read(self) -> dict[str, float]:
        """The figures since the last read; one all-gather and one host sync. Every rank must get here."""
        ranks = self._accelerator.num_processes
        moved, size = self._update.squares(self._loss)
        host = [float(peak_memory()), utilisation(self._loss.device)]
        told = torch.stack([self._loss, self._norm.to(self._wide), moved, size,
                            *torch.tensor(host, dtype=self._wide, device=self._loss.device)])  # fmt: skip
        everyone = self._accelerator.gather(told[None]).tolist()  # host sync
        times = self.clock.read()
        seconds = times.pop("seconds")
        losses, norms, moves, sizes, memory, busy = (list(column) for column in zip(*everyone, strict=True))
        figures = {
            "train/loss": sum(losses) / self._weight,
            "train/grad_norm": statistics.fmean(norms),
            "train/samples_per_second": self._samples / seconds,
        }
        if sum(sizes):
            figures["train/update_ratio"] = (sum(moves) / sum(sizes)) ** 0.5
        if self._tokens:
            figures["speed/tokens_per_second"] = self._weight / seconds
        if self._flops and self._peak:
            figures["speed/mfu"] = self._flops * self._samples / seconds / (self._peak * ranks)
        if not math.isnan(sum(busy)):
            figures["device/utilisation"] = statistics.fmean(busy)
        figures |= {"memory/peak_gib": max(memory) / 2**30, **times}
        self._loss.zero_()
        self._weight, self._samples = 0.0, 0
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What was summed since the last read, each rank's loss by itself. Host sync; every rank must get here."""
        losses = self._accelerator.gather(self._loss.reshape(1)).tolist()
        return {"losses": losses, "weight": self._weight, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with those sums: to the bit where the number of ranks is the same, else rank 0 takes all."""
        losses, rank = state["losses"], self._accelerator.process_index
        mine = losses[rank] if len(losses) == self._accelerator.num_processes else sum(losses) if rank == 0 else 0.0
        self._loss.fill_(mine)
        self._weight, self._samples = state["weight"], state["samples"]
        self.clock.restart()


class UpdateRatio:
    """How large an update is against the weights: |change| / |weights|; about 1e-3 is usual.

    Of models of more than a million weights a fixed sample of them is taken, so that nothing large is copied.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        mine = [local(parameter.detach()) for parameter in parameters]
        stride = max(1, sum(one.numel() for one in mine) // _SAMPLED)
        self._views = [one.view(-1)[::stride] for one in mine if one.numel() and one.is_contiguous()]
        self._before: list[Tensor] = []

    def before(self) -> None:
        """Remembers the weights."""
        self._before = [view.clone() for view in self._views]

    def squares(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of the change since :meth:`before` and of the weights then, 0-dim, of the type of ``like``."""
        if not self._before:
            return torch.zeros_like(like), torch.zeros_like(like)
        change = torch._foreach_sub(self._views, self._before)
        found = [torch.stack(torch._foreach_norm(one)).to(like.dtype).square().sum() for one in (change, self._before)]
        self._before = []
        return found[0], found[1]
