"""The guard: a step whose loss or gradient is not finite, or far out of line, changes nothing.

>>> guard = Guard(optimizer, device=device, policy=Policy(nonfinite="skip"))
>>> contagious(loss).backward()
>>> before = guard.resolve()                     # the previous step: by now it is known whether it was bad
>>> guard.step(global_norm(parameters))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oneloop.optim.bad_step_policy import Fault, Policy

_SMALLEST_SCALE = 2.0**-10


def contagious(loss: Tensor, factor: float = 1.0) -> Tensor:
    """``loss`` times ``factor``; where the loss is not finite, neither is its gradient.

    So the gradient norm tells all ranks of a loss that is NaN on one of them, or infinite with a finite gradient.
    """
    return loss * (factor + 0 * loss.detach())


@dataclass(frozen=True)
class Step:
    """A resolved step."""

    fault: Fault
    norm: Tensor
    """global gradient norm before clipping, 0-dim"""
    loss: Tensor
    """this rank's summed loss, 0-dim (NaN where it was not given)"""
    weight: float
    """of the global batch"""
    metrics: Tensor | None = None
    """what else was given with it"""


class Guard:
    """Keeps bad gradients away from weights and optimizer state, without a host wait.

    A step is pending from :meth:`step` until :meth:`resolve` returns its fault. Optimizers that take ``found_inf``
    (fused AdamW, Adam, SGD, Adagrad; Muon) skip on the device. The flag is copied to the host while the device works,
    and has arrived if the next backward is queued. Other optimizers cost one host read per step, before the update.

    With fp16 loss scaling (``scaler``, a torch GradScaler) a non-finite gradient means a smaller scale; the step is bad
    when the scale has fallen to nothing. torch's scaler reads the device at every step.

    Args:
        optimizer: over the sharded or whole parameters.
        device: of its parameters.
        scaler: of fp16.
        policy: what a bad step is.
        total: how a 0-dim tensor is summed over the ranks; needed for spikes of the loss. (Identity for one process.)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        scaler: Any = None,
        policy: Policy = Policy(),
        total: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._on_device = fused or hasattr(optimizer, "found_inf")
        self._total = total
        self._window = Window(policy.window, policy.sigma, device=device) if policy.sigma else None
        self._bad = torch.zeros((), device=device)  # value of the step's :class:`Fault`
        self._one = torch.ones((), device=device)
        self._told = _Copy(device)
        self._pending: tuple[Fault | None, Tensor, Tensor, float, Tensor | None] | None = None
        """the fault if it is known already, and the other fields of a :class:`Step`"""

    @property
    def pending(self) -> bool:
        """Whether a step was made that is not resolved."""
        return self._pending is not None

    def unscale(self) -> None:
        """Undoes the loss scale, before norm and clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self, norm: Tensor, *, loss: Tensor | None = None, weight: float = 1.0, metrics: Any = None) -> None:
        """Update the weights, unless the step is bad. The previous step must be resolved.

        Args:
            norm: global gradient norm, equal on all ranks.
            loss: this rank's summed loss of the step, 0-dim; for spikes.
            weight: what it is divided by, the same on all ranks.
            metrics: returned by :meth:`resolve`.

        Raises:
            RuntimeError: the previous step is still pending.
        """
        if self.pending:
            raise RuntimeError("the previous step is still pending: call resolve() first")
        mean = None if loss is None or self._window is None else loss.detach() / weight
        fault = self._scaled_step(norm, mean) if self.scaler is not None else self._plain_step(norm, mean)
        loss = torch.full_like(norm, torch.nan) if loss is None else loss
        self._pending = fault, norm, loss, weight, metrics

    def _plain_step(self, norm: Tensor, mean: Tensor | None) -> Fault | None:
        # Sets the flag where the norm is not finite: what torch.amp does to all gradients. (It also multiplies by one.)
        torch._amp_foreach_non_finite_check_and_unscale_([norm.detach()], self._bad.zero_(), self._one)
        if self._window is not None:
            self._bad = torch.maximum(self._bad, self._judged(norm, mean))
        if not self._on_device:
            fault = Fault(int(self._bad.item()))  # host sync
            if fault is Fault.NONE:
                self.optimizer.step()
            return fault
        self._told.send(self._bad)
        self.optimizer.found_inf = self._bad.clamp(max=1) if self._window else self._bad  # type: ignore[attr-defined]
        self.optimizer.step()
        return None

    def resolve(self) -> Step | None:
        """Return the pending step with its fault, or None if no step is pending.

        Wait for the device if the step was made just now. If another backward was queued since, the fault has arrived.
        """
        if self._pending is None:
            return None
        (fault, norm, loss, weight, metrics), self._pending = self._pending, None
        return Step(Fault(self._told.read()) if fault is None else fault, norm, loss, weight, metrics)

    def _judged(self, norm: Tensor, loss: Tensor | None) -> Tensor:
        """0, 1 where a value is not finite, 2 where it is far above those before; as :class:`Fault` counts."""
        assert self._window is not None
        values = (norm if loss is None else torch.stack([norm.to(loss.dtype), self._total(loss)])).reshape(-1)
        finite = torch.isfinite(values).all()
        return torch.where(finite, 2 * self._window.far(values, known=finite & (self._bad == 0)), 1.0)

    def _scaled_step(self, norm: Tensor, loss: Tensor | None) -> Fault:
        judged = 0 if self._window is None else int(self._judged(norm, loss))  # host sync, as the scaler's
        if judged == Fault.SPIKE.value:
            self.scaler.update()
            return Fault.SPIKE
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        return Fault.NONE if after >= before else Fault.RESCALED if after >= _SMALLEST_SCALE else Fault.NONFINITE

    def state_dict(self) -> dict[str, Any]:
        return self._window.state_dict() if self._window else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = None
        if self._window and state:
            self._window.load_state_dict(state)


class Window:
    """Mean and standard deviation of the last values on the device, and what is far above them."""

    def __init__(self, length: int, sigma: float, *, device: torch.device) -> None:
        self.length, self.sigma = length, sigma
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._values = torch.zeros(2, length, dtype=kind, device=device)
        self._place = torch.arange(length, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def far(self, values: Tensor, *, known: Tensor) -> Tensor:
        """1 where a value is more than ``sigma`` deviations above the mean, else 0; only then it joins the window.

        Args:
            values: one or two numbers.
            known: whether they are to be judged: finite, and of a step that was not bad before; 0-dim.
        """
        values = values.to(self._values.dtype)
        kept = self._values[: len(values)]
        deviation, mean = torch.std_mean(kept, dim=1)
        far = (known & (values > mean + self.sigma * deviation).any() & (self._count >= self.length)).to(torch.float32)
        joins = known & (far == 0)
        here = (self._place == self._count % self.length) & joins
        self._values[: len(values)] = torch.where(here, values[:, None], kept)
        self._count += joins
        return far

    def state_dict(self) -> dict[str, Any]:
        """Host sync."""
        return {"values": self._values.tolist(), "count": int(self._count.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = torch.tensor(state["values"], dtype=self._values.dtype)
        if values.shape == self._values.shape:  # another length begins anew
            self._values.copy_(values)
            self._count.fill_(state["count"])


class _Copy:
    """A number on its way from the device: copied beside the device's work, read when it has long arrived."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros((), pin_memory=device.type == "cuda")
        self._view = self._host.numpy()
        self._copied = torch.Event(device) if device.type != "cpu" else None

    def send(self, value: Tensor) -> None:
        self._host.copy_(value, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._view)
