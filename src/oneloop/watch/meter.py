"""Sums on the device between two log steps; reading them is the one visible host sync."""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor


class Meter:
    """What happened since the last :meth:`read`: loss, weight, samples, time, and the last gradient norm."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        device = accelerator.device
        self._loss = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._norm = torch.zeros((), device=device)
        self._weight = 0.0
        self._samples = 0
        self._since = time.perf_counter()

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
        """The figures since the last read; one all-reduce and one host sync. Every rank must get here."""
        told = torch.stack([self._loss, self._norm.to(self._loss.dtype) / self._accelerator.num_processes])
        loss, norm = self._accelerator.reduce(told, "sum").tolist()
        now = time.perf_counter()
        figures = {
            "train/loss": loss / self._weight,
            "train/grad_norm": norm,
            "train/samples_per_second": self._samples / (now - self._since),
        }
        self._loss.zero_()
        self._weight, self._samples, self._since = 0.0, 0, now
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
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Leaves the time since the last read (an evaluation) out of the next figures."""
        self._since = time.perf_counter()
