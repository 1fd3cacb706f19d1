"""EMA (exponential moving average) of the weights, kept per shard.

Also works in a plain Accelerate script.

>>> ema = EMA(model, half_life=10_000)           # in samples; after accelerator.prepare
>>> optimizer.step()
>>> ema.update(64)                               # samples of this step, over all processes
>>> with ema.swapped():                          # here the model has the EMA weights
...     evaluate(model)

The update rule is average = keep * average + (1 - keep) * weight, without communication. Buffers
are not averaged: EMA weights are evaluated and exported with the model's current buffers.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.side_copies import SideCopy, before_change
from oneloop.basics.tensors import as_real, local, reshard


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


class EMA:
    """EMA of a model's parameters, in float32 or better.

    Give exactly one of half_life, decay and power.

    Args:
        model: as prepared; under FSDP2 each rank averages its own shards.
        half_life: samples (or tokens, as :meth:`update` counts) after which the contribution of a
            weight has halved.
        decay: share of the average that one update keeps.
        power: width of a power-function EMA as a share of the run: its relative standard deviation
            sigma_rel (Karras et al. 2024, section 3). Saved EMAs can be combined into other widths:
            see :func:`post_hoc`.
        ramp: upper limit of the half-life as a share of the training so far (Karras et al. 2022),
            so that the initial weights are forgotten quickly; 0: no limit. Only for ``half_life``.
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
        decay: float | None = None,
        power: float | None = None,
        ramp: float = 0.05,
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
        self._keep = _law(half_life, decay, power, ramp)
        self.name = name
        self.every = every
        self.seen = 0.0  # amount trained so far, as :meth:`update` counts it
        self._due = 0.0  # amount since the last computation
        self._updates = 0  # calls since the last computation

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

        self._away: HostCopies | None = None
        if device == "cpu" and self._weights and self._weights[0].device.type != "cpu":
            self._away = HostCopies(self._weights, optimizer)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the current weights."""
        before_change()
        for mine, weight in zip(self._mine, self._weights, strict=True):
            mine.copy_(weight)
        self.seen = 0.0
        self._due = 0.0
        self._updates = 0

    @torch.no_grad()
    def begin(self, names: Collection[str]) -> None:
        """Reset the average of these tensors (names of :meth:`tensors`) to the current weights."""
        before_change()
        for name, mine, weight in zip(self._held, self._mine, self._weights, strict=True):
            if f"ema.{self.name}.{name}" in names:
                mine.copy_(weight)

    @torch.no_grad()
    def update(self, amount: float) -> None:
        """Update with the weights after an optimizer step.

        ``amount``: samples (or tokens) of the step, over all processes."""
        self._due += amount
        self.seen += amount
        self._updates += 1
        if self._updates < self.every:
            return
        keep = self._keep(self._due, self.seen, self._updates)
        self._due = 0.0
        self._updates = 0
        # On the host, the average follows in a thread.
        if self._away is not None:
            self._away.then(lambda weights: average_(self._mine, weights, keep, cast=True))
        elif self._mine:  # else this rank has no shard
            before_change()
            average_(self._mine, self._weights, keep, cast=self._cast)

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
        for number, (mine, weight) in enumerate(zip(self._mine, self._weights, strict=True)):
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
        return {"seen": self.seen, "due": self._due, "updates": self._updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the counters."""
        self.seen = state["seen"]
        self._due = state["due"]
        self._updates = int(state["updates"])


Law = Callable[[float, float, int], float]
"""(amount since the last computation, total amount, updates) -> share of the average to keep"""


def _law(half_life: float | None, decay: float | None, power: float | None, ramp: float) -> Law:
    """Return how much of the average to keep. Raise ValueError."""
    if half_life is not None:
        if not half_life > 0 or ramp < 0:
            raise ValueError(
                f"ema.half_life must be > 0 and ema.ramp must be >= 0; got {half_life} and {ramp}"
            )
        if not ramp:
            return lambda amount, seen, _: 0.5 ** (amount / half_life)
        return lambda amount, seen, _: 0.5 ** (amount / min(half_life, ramp * seen))
    if decay is not None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema.decay {decay} must be at least 0 and below 1")
        return lambda amount, seen, updates: decay**updates
    assert power is not None
    exponent = gamma(power) + 1
    return lambda amount, seen, _: (1.0 - amount / seen) ** exponent


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


class HostCopies:
    """Copies weights to pinned host memory on a separate stream, and passes them to a thread.

    The device continues during a copy; only the optimizer's next step waits for it.

    Args:
        weights: On the device.
        optimizer: Its step changes the weights.

    Raises:
        ValueError: the optimizer is missing.
    """

    def __init__(self, weights: list[Tensor], optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise ValueError(
                "an EMA in host memory needs the optimizer, whose next step waits for the copy"
            )
        self._weights = weights
        self._landing = []
        for tensor in weights:
            self._landing.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        self._copy: SideCopy | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ema")
        self._using: Future[None] | None = None

        # The end of the last step: the copy waits for it only, not for work queued since.
        self._stepped = torch.Event(weights[0].device)
        self._stepped.record()
        optimizer.register_step_post_hook(lambda *_: self._stepped.record())
        # No copy may read weights while a step writes them.
        optimizer.register_step_pre_hook(lambda *_: before_change())

    def then(self, use: Callable[[list[Tensor]], None]) -> None:
        """Start a copy; call ``use`` with the copies in a thread, once they are complete."""
        self.wait()  # until the host memory is free again
        self._copy = SideCopy(
            self._weights[0].device, self._weights, self._landing, after=self._stepped
        )
        copied = self._copy.copied

        def used() -> None:
            copied.synchronize()
            use(self._landing)

        self._using = self._thread.submit(used)

    def wait(self) -> None:
        """Wait until the last copy was used."""
        if self._using is not None:
            self._using.result()
            self._using = None
