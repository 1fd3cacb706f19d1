"""The finite guard: a step whose gradient is NaN or Inf changes nothing, and no later step does either."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SMALLEST_SCALE = 2.0**-10


class Guard:
    """Keeps non-finite gradients away from weights and optimizer state.

    Optimizers that take ``found_inf`` (fused AdamW, Adam, SGD, Adagrad; Muon) skip on the device, without a host wait,
    and go on skipping: the weights stay those from before the first bad step until :meth:`bad` is read. Others cost
    one host read per step.

    With fp16 loss scaling (``scaler``, a torch GradScaler) a non-finite gradient means a smaller scale and no step;
    the run is bad when the scale has fallen to nothing. torch's scaler reads the device at every step.
    """

    def __init__(self, optimizer: Optimizer, *, device: torch.device, scaler: Any = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self.on_device = fused or hasattr(optimizer, "found_inf")
        self.found = torch.zeros((), device=device)
        self._skipped = torch.zeros((), device=device)

    def unscale(self) -> None:
        """Undoes the loss scale, before norm and clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self, norm: Tensor) -> bool:
        """Updates the weights, unless this or an earlier global gradient ``norm`` is not finite.

        Returns:
            False where the loss scaler skipped the step.
        """
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return bool(self.scaler.get_scale() >= before)
        torch.maximum(self.found, (~torch.isfinite(norm)).to(self.found.dtype), out=self.found)
        self._skipped += self.found
        if self.on_device:
            self.optimizer.found_inf = self.found  # type: ignore[attr-defined]
        if self.on_device or not self.bad():  # host sync for the others
            self.optimizer.step()
        return True

    def bad(self) -> bool:
        """Whether the run has diverged. Host sync."""
        if self.scaler is not None:
            return bool(self.scaler.get_scale() < _SMALLEST_SCALE)
        return bool(self.found.item())

    def skipped(self) -> int:
        """Steps since the first non-finite gradient, that one included. Host sync."""
        return int(self._skipped.item())
