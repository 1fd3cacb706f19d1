"""The bad-step guard, which keeps bad steps from changing the weights.

A step is bad if its loss or gradient is not finite, or spikes.

>>> guard = Guard(optimizer, device=device)
>>> contagious(loss).backward()
>>> before = guard.resolve()                     # the previous step, with its fault if it was bad
>>> guard.step(global_norm(parameters))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oneloop.basics.device_flag import DeviceFlag
from oneloop.basics.side_copies import before_change
from oneloop.basics.tensors import plain_optimizer
from oneloop.basics.wide_sums import wide_dtype
from oneloop.optim.bad_step_policy import Fault
from oneloop.optim.elementwise import has_fused_kernels

_SMALLEST_SCALE = 2.0**-10
WINDOW = 100
"""number of last steps that a spike is compared with"""


def contagious(loss: Tensor, factor: float = 1.0) -> Tensor:
    """Return ``loss * factor``; if the loss is not finite, its gradient is not finite either.

    So the global gradient norm shows all ranks a loss that is NaN on one rank, or infinite with a
    finite gradient.
    """
    return loss * (factor + 0 * loss.detach())


@dataclass
class Step:
    """A step, which is pending until its fault is known."""

    fault: Fault
    norm: Tensor  # global gradient norm before clipping, 0-dim
    loss: Tensor  # this rank's summed loss, 0-dim (NaN if it was not given)
    weight: float  # total weight of the global batch
    metrics: Tensor | None = None  # the ``metrics`` that :meth:`Guard.step` was given


class Guard:
    """Keeps bad gradients out of the weights and the optimizer state, without a host sync.

    A step is pending from :meth:`step` until :meth:`resolve` returns its fault. Optimizers that
    take ``found_inf`` (fused AdamW, Adam, SGD, Adagrad; Muon) skip on the device. The flag is
    copied to the host while the device works, and has arrived if the next backward is queued. Other
    optimizers cost one host read per step, before the update.

    With fp16 loss scaling (``scaler``, a torch GradScaler) a non-finite gradient lowers the scale.
    The step is bad only if the scale falls below 2^-10. This needs no further host read.

    Args:
        optimizer: of the sharded or whole parameters; accelerate may have prepared it.
        device: device of the parameters.
        scaler: GradScaler of fp16, or None.
        sigma: threshold of a spike: standard deviations of loss or gradient norm above the mean of
            the last 100 steps (0: off).
        total: sums a 0-dim tensor over the ranks; required to find spikes of the loss. (One
            process: identity.)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        scaler: Any = None,
        sigma: float = 0.0,
        total: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        optimizer = plain_optimizer(optimizer)
        self.optimizer = optimizer
        self.scaler = scaler
        fused = [one.get("fused") and has_fused_kernels(one) for one in optimizer.param_groups]
        self._on_device = all(fused) or hasattr(optimizer, "found_inf")
        self._total = total
        self._fault_copy = DeviceFlag(device)
        self.pending: Step | None = None  # the step that is not yet resolved

        # The last norms and losses, on the device.
        self._sigma = sigma
        self._window = torch.zeros(2, WINDOW, dtype=wide_dtype(device), device=device)
        self._indices = torch.arange(WINDOW, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale: in each step, before the norm and clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(
        self, norm: Tensor, *, loss: Tensor | None = None, weight: float = 1.0, metrics: Any = None
    ) -> None:
        """Update the weights, unless the step is bad. The previous step must be resolved.

        Args:
            norm: global gradient norm, equal on all ranks.
            loss: this rank's summed loss (0-dim), to find spikes.
            weight: total weight of the global batch.
            metrics: :meth:`resolve` returns them.

        Raises:
            RuntimeError: the previous step is still pending.
        """
        if self.pending is not None:
            raise RuntimeError("the previous step is still pending: call resolve() first")
        before_change()  # a save may still copy the weights
        if self.scaler is None:
            bad = (norm.detach() * 0).ne(0).to(torch.float32)  # 1 if it is not finite
        else:
            bad = self._overflow()
        if self._sigma:
            # Collective: the mean loss of all ranks.
            values = norm.detach().reshape(1)
            if loss is not None:
                mean = self._total(loss.detach() / weight)
                values = torch.stack([norm.to(mean.dtype), mean])
            bad = torch.maximum(bad, self._spike(values, bad == 0))

        fault = Fault.NONE
        if self._on_device:
            # Start the copy to the host, and let the optimizer skip on the device. Afterwards, a
            # step without this guard must not skip because of it.
            self._fault_copy.send(bad)
            self.optimizer.found_inf = bad.clamp(max=1)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
        else:
            # An optimizer that does not take the flag must not step on bad gradients: read it.
            fault = Fault(int(bad.item()))  # host sync
            if fault is Fault.NONE:
                self.optimizer.step()
        if loss is None:
            loss = torch.full_like(norm, torch.nan)
        self.pending = Step(fault, norm, loss, weight, metrics)

    def resolve(self) -> Step | None:
        """Return the pending step with its fault, or None if no step is pending.

        Wait for the device if the step was made just now. If another backward was queued since, the
        fault has arrived.
        """
        step = self.pending
        self.pending = None
        if step is not None and self._on_device:
            step.fault = Fault(self._fault_copy.read())
        return step

    def _overflow(self) -> Tensor:
        """Let the scaler lower the loss scale if a gradient is not finite.

        Return the value of the :class:`Fault`, 0-dim.
        """
        # The scaler has looked at the gradients when it unscaled them.
        seen = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        if not seen:
            raise RuntimeError(
                "the gradients still have the loss scale: call unscale() before step()"
            )
        found = torch.stack([*seen.values()]).amax()
        self.scaler.update()
        large = self.scaler._get_scale_async() >= _SMALLEST_SCALE
        return found * torch.where(large, Fault.RESCALED.value, Fault.NONFINITE.value)

    def _spike(self, values: Tensor, good: Tensor) -> Tensor:
        """Return the value of the :class:`Fault`, 0-dim, without a host sync.

        It is 1 if a value is not finite, 2 if one is more than ``sigma`` deviations above the mean
        of the window, which must be full, else 0.

        Args:
            values: one or two numbers, the norm and the loss. They join the window unless they
                spike.
            good: 0-dim, whether the step is good so far. Else they are not compared, and do not
                join.
        """
        finite = torch.isfinite(values).all()
        good = good & finite
        values = values.to(self._window.dtype)
        window = self._window[: len(values)]
        deviation, mean = torch.std_mean(window, dim=1)
        above = (values > mean + self._sigma * deviation).any()
        spike = good & above & (self._count >= len(self._indices))

        # Overwrite the oldest values.
        joins = good & ~spike
        oldest = (self._indices == self._count % len(self._indices)) & joins
        window.copy_(torch.where(oldest, values[:, None], window))
        self._count += joins
        return torch.where(finite, 2.0 * spike, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain data (host sync); empty if spikes are not detected."""
        if not self._sigma:
            return {}
        return {"values": self._window.tolist(), "count": int(self._count.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending = None
        if self._sigma and state:
            self._window.copy_(torch.tensor(state["values"], dtype=self._window.dtype))
            self._count.fill_(state["count"])
