"""EMA (exponential moving average) of the weights, kept per shard.

Also works in a plain Accelerate script.

>>> ema = EMA(model, half_life=10_000)           # in samples; after accelerator.prepare
>>> optimizer.step()
>>> ema.update(64)                               # samples of this step, over all processes
>>> with ema.swapped():                          # here the model has the EMA weights
...     evaluate(model)

The update rule is average = keep * average + (1 - keep) * weight, without communication. Unless
``buffers`` is set, EMA weights are evaluated and exported with the model's current buffers.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.side_copies import HostCopies, before_change
from oneloop.basics.tensors import as_real, local, reshard

_RAMP = 0.05
"""limit of the half-life, as a share of the training so far, if none is given"""


@torch.no_grad()
def average_(
    averages: list[Tensor], weights: list[Tensor], keep: float, *, cast: bool = False
) -> None:
    """Set average = keep * average + (1 - keep) * weight, in place.

    Other forms would round differently. ``cast``: the weights have another dtype."""
    if cast:
        pairs = zip(weights, averages, strict=True)
        weights = [weight.to(average.dtype) for weight, average in pairs]
    torch._foreach_lerp_(averages, weights, 1.0 - keep)


@dataclass(frozen=True)
class Decay:
    """A decay that warms up, as in other libraries.

    Until update ``start`` + 1, the average is a copy of the weights. At update ``start`` + 1 + n,
    the decay is at most 1 - (1 + n / gamma) ** -power.

    - timm's ModelEmaV3 and ema-pytorch (denoising-diffusion): ``start`` is their
      ``update_after_step``, ``power`` 2/3 with their warm-up, else 0.
    - torchvision's ExponentialMovingAverage: ``start`` is the warm-up of the learning rate.
    """

    value: float
    """share of the average that one update keeps, in the end"""
    start: int = 0
    """updates"""
    power: float = 0.0
    """0: the decay is not limited"""
    gamma: float = 1.0
    """updates"""

    def __post_init__(self) -> None:
        if self.start < 0 or not self.power >= 0 or not self.gamma > 0:
            raise ValueError(
                "the decay of an EMA needs start >= 0, power >= 0 and gamma > 0; got "
                f"{self.start}, {self.power} and {self.gamma}"
            )

    def at(self, update: int) -> float:
        """Return the share of the average that this update keeps (the first update is 1)."""
        since = update - self.start - 1
        if since <= 0:
            return 0.0
        if not self.power:
            return self.value
        limit = 1.0 - float((1.0 + since / self.gamma) ** -self.power)
        return min(self.value, limit)


class EMA:
    """EMA of a model's parameters, in float32 or better.

    Give exactly one of half_life, decay and power.

    Args:
        model: as prepared; under FSDP2 each rank averages its own shards.
        half_life: samples (or tokens, as :meth:`update` counts) after which the contribution of a
            weight has halved.
        decay: share of the average that one update keeps. With a number, the average starts from
            the initial weights; see :class:`Decay` for other libraries.
        power: width of a power-function EMA as a share of the run: its relative standard deviation
            sigma_rel (Karras et al. 2024, section 3). Saved EMAs can be combined into other widths:
            see :func:`post_hoc`.
        ramp: upper limit of the half-life as a share of the training so far (Karras et al. 2022),
            so that the initial weights are forgotten quickly; 0: no limit; None: 0.05. Only for
            ``half_life``.
        buffers: also average persistent floating-point buffers, such as the statistics of
            BatchNorm. Each rank averages those it has, and those of rank 0 count.
        every: calls of :meth:`update` per computation; their amounts are added, so that the
            half-life is the same.
        device: ``"cpu"`` keeps the average in host memory; copies overlap with the device's work.
        optimizer: required for ``device="cpu"`` on an accelerator: its next step waits for the
            copy.
        name: name in checkpoints, logs and file names.

    Raises:
        ValueError: Not exactly one of the three is given, or a value is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        half_life: float | None = None,
        *,
        decay: float | Decay | None = None,
        power: float | None = None,
        ramp: float | None = None,
        buffers: bool = False,
        every: int = 1,
        device: str | None = None,
        optimizer: Optimizer | None = None,
        name: str = "ema",
    ) -> None:
        kinds = [kind for kind in (half_life, decay, power) if kind is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"an EMA needs one of half_life, decay and power; {len(kinds)} are given"
            )
        if ramp is not None and half_life is None:
            raise ValueError("the ramp of an EMA has an effect with half_life only")
        if isinstance(decay, Decay) and every != 1:
            raise ValueError(f"the decay of an EMA warms up with every = 1 only, got {every}")
        self._keep = _law(half_life, decay, power, ramp)
        self.name = name
        self.every = every
        self.seen = 0.0  # amount trained so far, as :meth:`update` counts it
        self._due = 0.0  # amount since the last computation
        self._updates = 0  # calls since the last computation
        self._calls = 0  # calls so far

        # Reshard first: after a forward without backward, FSDP2's root has other parameter objects.
        self._model = model
        reshard(self._model)
        self._parameters: dict[str, nn.Parameter] = {}
        self._shadow: dict[str, Tensor] = {}
        for full_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                bare = bare_name(full_name)
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._parameters[bare] = parameter
                self._shadow[bare] = _new(parameter, wide, device)

        # This rank's shards, in lists for fused operations; uneven shards may be empty.
        self._held: list[str] = []  # their names
        self._mine: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._cast = False
        for bare, parameter in self._parameters.items():
            mine = local(self._shadow[bare])
            weight = local(parameter).detach()
            if mine.numel():
                self._held.append(bare)
                self._mine.append(mine)
                self._weights.append(weight)
                self._cast |= mine.dtype != weight.dtype

        # Buffers are looked up at each use: a forward may replace them.
        self._owners: list[tuple[nn.Module, str]] = []
        if buffers:
            self._add_buffers(model, device)

        self._away: HostCopies | None = None
        if device == "cpu" and self._weights and self._weights[0].device.type != "cpu":
            self._away = HostCopies(self._weights, optimizer)
        self.restart()

    def _add_buffers(self, model: nn.Module, device: str | None) -> None:
        """Average the persistent floating-point buffers, too."""
        if device is not None:
            raise ValueError(f"an EMA on device {device} cannot average buffers")
        for full_name, buffer in model.named_buffers():
            path, _, key = full_name.rpartition(".")
            owner = model.get_submodule(path)
            # One byte holds a quantized number, or a boolean.
            averaged = buffer.is_floating_point() and buffer.element_size() > 1
            if averaged and buffer.numel() and key not in owner._non_persistent_buffers_set:
                wide = torch.promote_types(buffer.dtype, torch.float32)
                average = torch.empty_like(buffer, dtype=wide, requires_grad=False)
                bare = bare_name(full_name)
                self._shadow[bare] = average
                self._held.append(bare)
                self._mine.append(average)
                self._owners.append((owner, key))
                self._cast |= buffer.dtype != wide
        if not self._owners:
            raise ValueError(
                "the model has no persistent floating-point buffers, so ema.buffers true has no "
                "effect; remove it"
            )

    def _current(self) -> list[Tensor]:
        """Return the weights, and the buffers if they are averaged, that belong to the average."""
        buffers: list[Any] = [owner._buffers[key] for owner, key in self._owners]
        return [*self._weights, *buffers]

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the current weights."""
        before_change()
        for mine, weight in zip(self._mine, self._current(), strict=True):
            mine.copy_(weight)
        self.seen = 0.0
        self._due = 0.0
        self._updates = 0
        self._calls = 0

    @torch.no_grad()
    def begin(self, names: Collection[str]) -> None:
        """Reset the average of these tensors (names of :meth:`tensors`) to the current weights."""
        before_change()
        for name, mine, weight in zip(self._held, self._mine, self._current(), strict=True):
            if f"ema.{self.name}.{name}" in names:
                mine.copy_(weight)

    @torch.no_grad()
    def update(self, amount: float) -> None:
        """Update with the weights after an optimizer step.

        ``amount``: samples (or tokens) of the step, over all processes."""
        if not hasattr(amount, "__float__"):
            raise TypeError(
                f"ema.update takes a number of samples (batch_size), got {type(amount).__name__}"
            )
        self._due += amount
        self.seen += amount
        self._updates += 1
        self._calls += 1
        if self._updates < self.every:
            return
        keep = self._keep(self._due, self.seen, self._updates, self._calls)
        self._due = 0.0
        self._updates = 0
        # On the host, the average follows in a thread.
        if self._away is not None:
            self._away.then(lambda weights: average_(self._mine, weights, keep, cast=True))
        elif self._mine:  # else this rank has no shard
            before_change()
            average_(self._mine, self._current(), keep, cast=self._cast)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the EMA weights into the model in this context; afterwards swap them back.

        One tensor is exchanged at a time, without a second copy of the model; only 16-bit weights
        are copied aside."""
        if self._away is not None:
            self._away.wait()
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

    def tensors(self) -> dict[str, Tensor]:
        """Return the EMA tensors by ``ema.<name>.<parameter>``: not copies, sharded likewise."""
        if self._away is not None:
            self._away.wait()
        return {f"ema.{self.name}.{name}": as_real(tensor) for name, tensor in self._shadow.items()}

    def state_dict(self) -> dict[str, float]:
        """Return the counters, which belong to the state in addition to :meth:`tensors`."""
        if self._away is not None:
            self._away.wait()
        return {
            "seen": self.seen,
            "due": self._due,
            "updates": self._updates,
            "calls": self._calls,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the counters."""
        self.seen = float(state["seen"])
        self._due = float(state["due"])
        self._updates = int(state["updates"])
        self._calls = int(state["calls"])


Law = Callable[[float, float, int, int], float]
"""(amount since the last computation, total amount, updates since then, total updates) -> share of
the average to keep"""


def _law(
    half_life: float | None,
    decay: float | Decay | None,
    power: float | None,
    ramp: float | None,
) -> Law:
    """Return how much of the average to keep. Raise ValueError."""
    if half_life is not None:
        ramp = _RAMP if ramp is None else ramp
        if not half_life > 0 or ramp < 0:
            raise ValueError(
                f"ema.half_life must be > 0 and ema.ramp must be >= 0; got {half_life} and {ramp}"
            )
        if not ramp:
            return lambda amount, *_: 0.5 ** (amount / half_life)
        return lambda amount, seen, *_: 0.5 ** (amount / min(half_life, ramp * seen))
    if decay is not None:
        value = decay.value if isinstance(decay, Decay) else decay
        if not 0 <= value < 1:
            raise ValueError(f"ema.decay {value} must be at least 0 and below 1")
        if isinstance(decay, Decay):
            return lambda amount, seen, updates, calls: decay.at(calls)
        return lambda amount, seen, updates, calls: value**updates
    assert power is not None
    exponent = gamma(power) + 1
    return lambda amount, seen, *_: (1.0 - amount / seen) ** exponent


def _new(parameter: Tensor, dtype: torch.dtype, device: str | None) -> Tensor:
    """Return a tensor for the average, sharded as the parameter."""
    if device is None or device == parameter.device.type:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    shape = local(parameter).shape
    mine = torch.empty(shape, dtype=dtype, device=device, pin_memory=device == "cpu")
    if not isinstance(parameter, DTensor):
        return mine

    # Describe the host's shard with the parameter's placements.
    meta = parameter._spec.tensor_meta
    assert meta is not None
    spec = replace(parameter._spec, tensor_meta=meta._replace(dtype=dtype))
    return DTensor(mine, spec, requires_grad=False)  # from_local would move it to the mesh's device


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


def post_hoc(saved: list[tuple[float, float]], wanted: tuple[float, float]) -> list[float]:
    """Return the factors that combine saved power-function averages into one that was not kept.

    They are a least-squares fit (Karras et al. 2024, algorithm 3). An average is a pair: samples
    seen, sigma_rel."""
    import numpy as np

    def inner(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
        # The inner product of two averages' weight functions.
        ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
        scale = (gamma_a + gamma_b + 1) * np.maximum(t_a, t_b)
        return (gamma_a + 1) * (gamma_b + 1) * ratio / scale

    t = np.array([seen for seen, _ in saved])[:, None]
    g = np.array([gamma(sigma_rel) for _, sigma_rel in saved])[:, None]
    seen, sigma_rel = wanted
    among = inner(t, g, t.T, g.T)
    factors = np.linalg.solve(among, inner(t, g, seen, gamma(sigma_rel)))
    return [float(factor) for factor in factors[:, 0]]
