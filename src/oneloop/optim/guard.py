"""The guard: a step whose loss or gradient is not finite, or far out of line, changes nothing.

>>> guard = Guard(optimizer, device=device, policy=Policy(nonfinite="skip"))
>>> loss.backward()
>>> if guard.verdict(wait=True) is not Verdict.TAKEN: ...      # of the step before, known by now
>>> guard.step(global_norm(parameters))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oneloop.optim.policy import Policy, Verdict

_SMALLEST_SCALE = 2.0**-10


class Guard:
    """Keeps bad gradients away from weights and optimizer state, without a host wait.

    Optimizers that take ``found_inf`` (fused AdamW, Adam, SGD, Adagrad; Muon) skip on the device. Where every bad step
    ends the run they go on skipping, and nothing is read until the caller waits for a verdict; where the run may go on,
    the flag is copied to the host beside the next step's work, and read there one step late. Other optimizers cost one
    host read per step, before the update.

    With fp16 loss scaling (``scaler``, a torch GradScaler) a non-finite gradient means a smaller scale; the run is bad
    when the scale has fallen to nothing. torch's scaler reads the device at every step.

    Args:
        optimizer: over the sharded or whole parameters.
        device: of its parameters.
        scaler: of fp16.
        policy: what a bad step is, and whether the run may go on after one.
        total: how a 0-dim tensor is summed over the ranks; needed for spikes of the loss. (Identity for one process.)
    """

    def __init__(self, optimizer: Optimizer, *, device: torch.device, scaler: Any = None,
                 policy: Policy = Policy(), total: Callable[[Tensor], Tensor] = lambda x: x) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.scaler = scaler
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._on_device = fused or hasattr(optimizer, "found_inf")
        self._total = total
        self._window = Window(policy.window, policy.sigma, device=device) if policy.sigma else None
        self._found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._since = torch.zeros((), device=device)
        self._known: Verdict | None = Verdict.TAKEN
        self._latches = not policy.goes_on
        self._late = _Late(device) if policy.goes_on and scaler is None and self._on_device else None

    def unscale(self) -> None:
        """Undoes the loss scale, before norm and clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self, norm: Tensor, *, loss: Tensor | None = None, weight: float = 1.0) -> None:
        """Updates the weights, unless the step is bad.

        Args:
            norm: global gradient norm, equal on all ranks.
            loss: this rank's summed loss of the step, 0-dim; for spikes.
            weight: what it is divided by, the same on all ranks.
        """
        mean = None if loss is None or self._window is None else loss.detach() / weight
        if self.scaler is not None:
            self._known = self._scaled_step(norm, mean)
            return
        if self._latches:
            # Sets the flag where the norm is not finite, and leaves it set: what torch.amp does to all gradients.
            torch._amp_foreach_non_finite_check_and_unscale_([norm.detach().clone()], self._found, self._one)
        else:
            self._found = (~torch.isfinite(norm)).to(self._found.dtype)
        if self._window is not None:
            self._found = torch.maximum(self._found, self._judged(norm, mean))
        if self._late is not None:
            self._late.tell(self._found)
        elif self._latches:
            self._since += self._found.clamp(max=1)
        self._known = None
        if self._on_device:
            self.optimizer.found_inf = self._found.clamp(max=1) if self._window else self._found  # type: ignore[attr-defined]
        elif found := int(self._found.item()):  # host sync for the others
            self._known = Verdict(found)
        if self._known in (None, Verdict.TAKEN):
            self.optimizer.step()

    def _judged(self, norm: Tensor, loss: Tensor | None) -> Tensor:
        """0, 1 where a value is not finite, 2 where it is far above those before; as :class:`Verdict` counts."""
        assert self._window is not None
        values = (norm if loss is None else torch.stack([norm.to(loss.dtype), self._total(loss)])).reshape(-1)
        finite = torch.isfinite(values).all()
        return torch.where(finite, 2 * self._window.far(values, known=finite & (self._found == 0)), 1.0)

    def _scaled_step(self, norm: Tensor, loss: Tensor | None) -> Verdict:
        if (
            self._window is not None and int(self._judged(norm, loss)) == Verdict.SPIKE.value
        ):  # host sync, as the scaler's
            self.scaler.update()
            return Verdict.SPIKE
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        return Verdict.TAKEN if after >= before else Verdict.RESCALED if after >= _SMALLEST_SCALE else Verdict.NONFINITE

    def verdict(self, *, wait: bool) -> Verdict | None:
        """What became of the last step; None where that is not known yet.

        Args:
            wait: True waits for it (host sync) where it was made just now; where another step's work was given to the
                device since, it is there already. False: only what is known anyhow.
        """
        if self._known is None and self._late is not None:
            self._known = Verdict(self._late.read()) if wait else None
        elif self._known is None:
            if not wait:
                return (
                    Verdict.TAKEN
                )  # or an earlier one was bad: then nothing has changed since, and the next wait tells
            self._known = Verdict(int(self._found.item()))
        return self._known

    def bad_steps(self) -> int:
        """Steps since the first bad one, that one included, where all bad ones end the run. Host sync."""
        return max(1, int(self._since.item()))

    def state_dict(self) -> dict[str, Any]:
        return self._window.state_dict() if self._window else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = Verdict.TAKEN
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


class _Late:
    """A number on its way from the device: copied beside the device's work, read when it has long arrived."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros((), pin_memory=device.type == "cuda")
        self._view = self._host.numpy()
        self._copied = torch.Event(device) if device.type != "cpu" else None

    def tell(self, value: Tensor) -> None:
        self._host.copy_(value, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._view)
