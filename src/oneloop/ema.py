"""EMA (exponential moving average) of the weights, kept per shard.

Also works in a plain Accelerate script.

>>> ema = EMA(model, EMASettings(half_life=10_000))   # in samples; after accelerator.prepare
>>> optimizer.step()
>>> ema.update(64)                               # samples of this step, over all processes
>>> with ema.swapped():                          # here the model has the EMA weights
...     evaluate(model)

The update rule is average = keep * average + (1 - keep) * weight, without communication. Unless
``buffers`` is set, EMA weights are evaluated and exported with the model's current buffers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.side_copies import HostCopies, before_change
from oneloop.basics.tensors import as_real, local, reshard

_RAMP = 0.05
"""limit of the half-life, as a share of the training so far (Karras et al. 2022), so that the
initial weights are forgotten quickly"""
_COUNTERS = ("seen", "due", "calls")
"""attributes of an EMA that a checkpoint stores"""


@torch.no_grad()
def average_(averages: list[Tensor], weights: list[Tensor], keep: float) -> None:
    """Set average = keep * average + (1 - keep) * weight, in place.

    Other forms would round differently."""
    pairs = zip(weights, averages, strict=True)
    torch._foreach_lerp_(averages, [one.to(other.dtype) for one, other in pairs], 1.0 - keep)


@dataclass(frozen=True)
class EMASettings:
    """How an EMA averages. Give exactly one of half_life, decay and power.

    A warm-up needs a decay and ``every`` 1. With ``device``, buffers cannot be averaged.

    The warm-ups of other libraries, which use a decay:

    - timm's ModelEmaV3 and ema-pytorch (denoising-diffusion): ``start`` is their
      ``update_after_step``, ``warmup_power`` 2/3 with their warm-up, else 0.
    - diffusers' EMAModel with ``use_ema_warmup``: the same; ``warmup_gamma`` is ``inv_gamma``.
    - torchvision's ExponentialMovingAverage: ``start`` is the warm-up of the learning rate.

    Raises:
        ValueError: Not exactly one of the three is given, or a value is out of range.
    """

    half_life: float | None = None
    """samples (or tokens, as :meth:`EMA.update` counts) after which the contribution of a weight
    has halved; at most 5% of the training so far"""
    decay: float | None = None
    """share of the average that one update keeps, in the end"""
    power: float | None = None
    """width of a power-function EMA as a share of the run: its relative standard deviation
    sigma_rel (Karras et al. 2024, section 3). oneloop export combines saved EMAs into other
    widths"""
    start: int | None = None
    """until update start + 1, an average with a decay is a copy of the weights; None: it starts
    from the initial weights"""
    warmup_power: float = 0.0
    """at update start + 1 + n, the decay is at most 1 - (1 + n / warmup_gamma) ** -warmup_power
    (0: it is not limited)"""
    warmup_gamma: float = 1.0
    """scale of this warm-up, in updates"""
    buffers: bool = False
    """also average persistent floating-point buffers, such as the statistics of BatchNorm. Each
    rank averages those it has, and those of rank 0 count"""
    every: int = 1
    """calls of :meth:`EMA.update` per computation; their amounts are added, so that the half-life
    is the same"""
    device: str | None = None
    """cpu keeps the average in host memory; copies overlap with the device's work"""
    name: str = "ema"
    """name in checkpoints, logs and file names"""

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.half_life, self.decay, self.power) if rate is not None]
        if len(rates) != 1:
            raise ValueError(
                f"an EMA needs one of half_life, decay and power; {len(rates)} are given"
            )
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay {self.decay} must be at least 0 and below 1")
        if self.power is not None:
            gamma(self.power)

    def kept(self, *, amount: float, seen: float, calls: int) -> float:
        """Return the share of the average that a computation keeps.

        Args:
            amount: trained since the last computation.
            seen: amount of the whole training.
            calls: number of all updates.
        """
        if self.half_life is not None:
            return float(0.5 ** (amount / min(self.half_life, _RAMP * seen)))
        if self.power is not None:
            return float((1.0 - amount / seen) ** (gamma(self.power) + 1))
        assert self.decay is not None
        since = calls - (self.start or 0) - 1
        if self.start is not None and since <= 0:
            return 0.0
        if not self.warmup_power:
            return float(self.decay**self.every)
        limit = 1.0 - float((1.0 + max(since, 0) / self.warmup_gamma) ** -self.warmup_power)
        return min(self.decay, limit)


class EMA:
    """EMA of a model's parameters, in float32 or better.

    Args:
        model: as prepared; under FSDP2 each rank averages its own shards.
        settings: how to average.
        optimizer: required for the device ``"cpu"`` on an accelerator: its next step waits for the
            copy.

    Raises:
        ValueError: the settings do not fit the model.
    """

    def __init__(
        self, model: nn.Module, settings: EMASettings, *, optimizer: Optimizer | None = None
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.seen = 0.0  # amount trained so far, as :meth:`update` counts it
        self.due = 0.0  # amount since the last computation
        self.calls = 0  # calls of :meth:`update` so far

        # Reshard first: after a forward without backward, FSDP2's root has other parameter objects.
        self._model = model
        reshard(self._model)
        averaged: dict[str, Tensor] = {}
        for full_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                averaged[bare_name(full_name)] = parameter
        self._weights = [local(parameter).detach() for parameter in averaged.values()]

        # Buffers are looked up at each use: a forward may replace them.
        self._owners: list[tuple[nn.Module, str]] = []
        for full_name, buffer in model.named_buffers() if settings.buffers else ():
            path, _, key = full_name.rpartition(".")
            owner = model.get_submodule(path)
            # One byte holds a quantized number, or a boolean.
            is_number = buffer.is_floating_point() and buffer.element_size() > 1
            if is_number and buffer.numel() and key not in owner._non_persistent_buffers_set:
                averaged[bare_name(full_name)] = buffer
                self._owners.append((owner, key))

        # All averages, sharded as the parameters; and this rank's shards, which may be empty, in a
        # list for fused operations.
        self._averages = {name: _new(tensor, settings.device) for name, tensor in averaged.items()}
        self._mine = [local(average) for average in self._averages.values()]

        self._away: HostCopies | None = None
        if settings.device == "cpu" and self._weights and self._weights[0].device.type != "cpu":
            self._away = HostCopies(self._weights, optimizer)
        self.restart()

    def _current(self) -> list[Tensor]:
        """Return the weights, and the buffers if they are averaged, that belong to the average."""
        buffers: list[Any] = [owner._buffers[key] for owner, key in self._owners]
        return [*self._weights, *buffers]

    def restart(self) -> None:
        """Reset the average to the current weights."""
        self.begin(self.tensors())
        self.load_state_dict(dict.fromkeys(_COUNTERS, 0))

    @torch.no_grad()
    def begin(self, names: Collection[str]) -> None:
        """Reset the average of these tensors (names of :meth:`tensors`) to the current weights."""
        before_change()
        for name, mine, weight in zip(self._averages, self._mine, self._current(), strict=True):
            if f"ema.{self.name}.{name}" in names:
                mine.copy_(weight)

    @torch.no_grad()
    def update(self, amount: float) -> None:
        """Update with the weights after an optimizer step.

        ``amount``: samples (or tokens) of the step, over all processes."""
        self.due += amount
        self.seen += amount
        self.calls += 1
        if self.calls % self.settings.every:
            return
        keep = self.settings.kept(amount=self.due, seen=self.seen, calls=self.calls)
        self.due = 0.0
        # On the host, the average follows in a thread.
        if self._away is not None:
            self._away.then(lambda weights: average_(self._mine, weights, keep))
        elif self._mine:
            before_change()
            average_(self._mine, self._current(), keep)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the EMA weights into the model in this context; afterwards swap them back.

        One tensor is exchanged at a time, without a second copy of the model; only 16-bit weights
        are copied aside."""
        self._wait()
        aside = self._exchange({})
        try:
            yield
        finally:
            self._exchange(aside)

    @torch.no_grad()
    def _exchange(self, aside: dict[int, Tensor]) -> dict[int, Tensor]:
        """Exchange averages and weights; return the weights that do not fit into the average.

        ``aside``: those of the exchange before, by number."""
        before_change()
        reshard(self._model)  # else FSDP2 would use the gathered weights
        taken: dict[int, Tensor] = {}
        current = self._current()
        for number, (mine, weight) in enumerate(zip(self._mine, current, strict=True)):
            if number in aside:  # the average was not overwritten
                weight.copy_(aside[number])
                continue
            held = weight.clone()
            weight.copy_(mine)
            if held.dtype == mine.dtype:
                mine.copy_(held)
            else:  # a copy of the average in 16 bits would lose digits
                taken[number] = held
        return taken

    def _wait(self) -> None:
        """Wait until the thread has used the last copy."""
        if self._away is not None:
            self._away.wait()

    def tensors(self) -> dict[str, Tensor]:
        """Return the EMA tensors by ``ema.<name>.<parameter>``: not copies, sharded likewise."""
        self._wait()
        averages = self._averages.items()
        return {f"ema.{self.name}.{name}": as_real(average) for name, average in averages}

    def state_dict(self) -> dict[str, float]:
        """Return the counters, which belong to the state in addition to :meth:`tensors`."""
        self._wait()
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the counters."""
        for name in _COUNTERS:
            setattr(self, name, state[name])


def _new(tensor: Tensor, device: str | None) -> Tensor:
    """Return a tensor for the average, sharded as the parameter or buffer."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if device is None or device == tensor.device.type:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    shape = local(tensor).shape
    mine = torch.empty(shape, dtype=dtype, device=device, pin_memory=device == "cpu")
    if not isinstance(tensor, DTensor):
        return mine

    # Describe the host's shard with the parameter's placements.
    meta = tensor._spec.tensor_meta
    assert meta is not None
    spec = replace(tensor._spec, tensor_meta=meta._replace(dtype=dtype))
    return DTensor(mine, spec, requires_grad=False)  # from_local would move it to the mesh's device


@cache
def gamma(sigma_rel: float) -> float:
    """Return the exponent of the power-function average of a relative standard deviation.

    This is algorithm 2 of Karras et al. 2024. Raise ValueError if no average is that wide."""
    import numpy as np

    widest = 12**-0.5
    if not 0 < sigma_rel < widest:
        raise ValueError(
            f"ema.power {sigma_rel} must be above 0 and below {widest:.3f}; common values: "
            "0.05 to 0.15"
        )
    # The exponent is the largest root of a cubic polynomial.
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())
