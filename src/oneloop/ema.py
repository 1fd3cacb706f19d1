"""Averages of the weights along the run, kept shard by shard. Works alone in a plain Accelerate script.

>>> ema = EMA(model, half_life=10_000)           # in samples; after accelerator.prepare
>>> optimizer.step()
>>> ema.update(64)                               # samples of this step, over all processes
>>> with ema.swapped():                          # the model holds the average in here
...     evaluate(model)

An update communicates nothing and is one ``torch._foreach_lerp_`` (one form everywhere: ``mul_().add_()`` rounds
differently). Buffers are not averaged: an average is evaluated and exported with the model's buffers as they are then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.names import bare_name
from oneloop.basics.sharding import reshard
from oneloop.basics.tensors import as_real, local


class EMA:
    """One average of a model's parameters, in float32 or better. Give exactly one of the three kinds.

    Args:
        model: as prepared; under FSDP2 each rank averages its own shards.
        half_life: samples (or tokens: what :meth:`update` counts) after which a weight counts half.
        decay: share of the average that one update keeps.
        power: width of a power-function average as a share of the run, its relative standard deviation sigma_rel
            (Karras et al. 2024, section 3); what was saved of them along the run can be mixed into any other width,
            see :func:`post_hoc`.
        ramp: the half-life is at most this share of what was trained so far (Karras et al. 2022), so that the start
            is forgotten quickly; 0: no ramp. For ``half_life`` only.
        every: updates per ``lerp``; what they counted is added up, so that the half-life stays the same.
        device: ``"cpu"`` keeps the average in host memory; copies overlap with what the device does next.
        optimizer: needed for ``device="cpu"`` on an accelerator: its next step waits until the copy is made.
        name: in checkpoints, logs and file names.

    Raises:
        ValueError: not exactly one kind, or a value out of range.
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
            raise ValueError(f"an EMA needs one of half_life, decay and power; {len(kinds)} are given")
        self._keep = _law(half_life, decay, power, ramp)
        self.name, self.every = name, every
        self.seen = 0.0
        """what was trained so far, as :meth:`update` counts it"""
        self._due, self._updates = 0.0, 0
        self._model = model
        # Taken while sharded: after a forward alone FSDP2's root would hand out other objects.
        reshard(self._model)
        self._parameters = {bare_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        self._shadow = {
            name: _room(p, torch.promote_types(p.dtype, torch.float32), device) for name, p in self._parameters.items()
        }
        pairs = [(local(self._shadow[name]), local(p)) for name, p in self._parameters.items()]
        pairs = [(mine, theirs.detach()) for mine, theirs in pairs if mine.numel()]  # uneven shards may be empty
        self._mine, self._theirs = [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
        self._held = [name for name in self._parameters if local(self._shadow[name]).numel()]
        self._alike = all(mine.dtype == theirs.dtype for mine, theirs in pairs)
        self._away = (
            _Copies(self._mine, self._theirs, optimizer)
            if device == "cpu" and pairs and (pairs[0][1].device.type != "cpu")
            else None
        )
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """The average becomes the model's weights of now."""
        for mine, theirs in zip(self._mine, self._theirs, strict=True):
            mine.copy_(theirs)
        self.seen, self._due, self._updates = 0.0, 0.0, 0

    @torch.no_grad()
    def begin(self, names: Collection[str]) -> None:
        """Of these tensors, as :meth:`tensors` names them, the average becomes the model's weights of now."""
        for name, mine, theirs in zip(self._held, self._mine, self._theirs, strict=True):
            if f"ema.{self.name}.{name}" in names:
                mine.copy_(theirs)

    @torch.no_grad()
    def update(self, amount: float) -> None:
        """Takes in the weights after one optimizer step.

        Args:
            amount: samples (or tokens) of that step, over all processes.
        """
        self._due += amount
        self.seen += amount
        self._updates += 1
        if self._updates < self.every:
            return
        weight = 1.0 - self._keep(self._due, self.seen, self._updates)
        self._due, self._updates = 0.0, 0
        if self._away is not None:
            self._away.lerp(weight)
            return
        if not self._mine:  # this rank holds no element of the model
            return
        torch._foreach_lerp_(self._mine, self._theirs if self._alike else _as(self._theirs, self._mine), weight)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """In here the model holds the average, in the places where its weights were; training's weights come back.

        No second model: one tensor at a time is exchanged. (Weights in less than float32 are set aside instead.)
        """
        if self._away is not None:
            self._away.wait()
        aside = self._exchange({})
        try:
            yield
        finally:
            self._exchange(aside)

    @torch.no_grad()
    def _exchange(self, aside: dict[int, Tensor]) -> dict[int, Tensor]:
        reshard(self._model)  # else what is gathered would go on being used
        taken: dict[int, Tensor] = {}
        for number, (mine, theirs) in enumerate(zip(self._mine, self._theirs, strict=True)):
            if number in aside:
                theirs.copy_(aside[number])
                continue
            held = theirs.clone()
            theirs.copy_(mine)
            if held.dtype == mine.dtype:
                mine.copy_(held)
            else:
                taken[number] = held
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """The average by ``ema.<name>.<parameter>``; the tensors themselves, sharded as the parameters are."""
        if self._away is not None:
            self._away.wait()
        return {f"ema.{self.name}.{name}": as_real(tensor) for name, tensor in self._shadow.items()}

    def state_dict(self) -> dict[str, float]:
        """What belongs to the average beside :meth:`tensors`."""
        if self._away is not None:
            self._away.wait()
        return {"seen": self.seen, "due": self._due, "updates": self._updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from there."""
        self.seen, self._due, self._updates = state["seen"], state["due"], int(state["updates"])


Law = Callable[[float, float, int], float]
"""(amount since the last update, all that was seen, updates) -> share of the average that is kept"""


def _law(half_life: float | None, decay: float | None, power: float | None, ramp: float) -> Law:
    if half_life is not None:
        if not half_life > 0 or ramp < 0:
            raise ValueError(
                f"ema.half_life {half_life} and ema.ramp {ramp}: the first must be above 0, the second not below"
            )
        return lambda amount, seen, _: 0.5 ** (amount / (min(half_life, ramp * seen) if ramp else half_life))
    if decay is not None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema.decay {decay} must be at least 0 and below 1")
        return lambda amount, seen, updates: decay**updates
    assert power is not None
    exponent = gamma(power) + 1
    return lambda amount, seen, _: (1.0 - amount / seen) ** exponent


def gamma(sigma_rel: float) -> float:
    """Exponent of the power-function average with this relative standard deviation (Karras et al. 2024, algorithm 2).

    Raises:
        ValueError: no power function is that wide.
    """
    import numpy as np

    widest = 12**-0.5
    if not 0 < sigma_rel < widest:
        raise ValueError(f"ema.power {sigma_rel} must be above 0 and below {widest:.3f}; 0.05 to 0.15 is usual")
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def post_hoc(saved: list[tuple[float, float]], wanted: tuple[float, float]) -> list[float]:
    """How to mix saved power-function averages into one that was not kept (Karras et al. 2024, algorithm 3).

    Args:
        saved: (what was seen, sigma_rel) of each.
        wanted: the same of the average to make.

    Returns:
        A factor for each; the mix is the least-squares best.
    """
    import numpy as np

    def inner(t_a: Any, gamma_a: Any, t_b: Any, gamma_b: Any) -> Any:
        ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
        return (gamma_a + 1) * (gamma_b + 1) * ratio / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))

    t = np.array([seen for seen, _ in saved])[:, None]
    g = np.array([gamma(sigma_rel) for _, sigma_rel in saved])[:, None]
    factors = np.linalg.solve(inner(t, g, t.T, g.T), inner(t, g, wanted[0], gamma(wanted[1])))
    return [float(factor) for factor in factors[:, 0]]


def _room(parameter: Tensor, dtype: torch.dtype, device: str | None) -> Tensor:
    """An empty tensor, sharded as the parameter is."""
    if device is None or device == parameter.device.type:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    here = torch.empty(local(parameter).shape, dtype=dtype, device=device, pin_memory=device == "cpu")
    if not isinstance(parameter, DTensor):
        return here
    meta = parameter._spec.tensor_meta
    assert meta is not None
    spec = replace(parameter._spec, tensor_meta=meta._replace(dtype=dtype))
    return DTensor(here, spec, requires_grad=False)  # from_local would move it to the mesh's device


def _as(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, like, strict=True)]


class _Copies:
    """The way of the weights to an average in host memory: a stream of its own, pinned memory, a thread that adds.

    The device goes on while a copy is under way; only the optimizer's next step waits for it.
    """

    def __init__(self, mine: list[Tensor], theirs: list[Tensor], optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise ValueError("an EMA in host memory needs the optimizer, whose next step waits until the copy is made")
        self._mine, self._theirs = mine, theirs
        self._landing = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in theirs]
        self._stream = torch.Stream(theirs[0].device)
        self._copied: torch.Event | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ema")
        self._adding: Future[None] | None = None
        self._stepped = torch.Event(theirs[0].device)
        """the weights are those of the last step: the copy need not wait for what was given to the device since"""
        self._stepped.record()
        optimizer.register_step_post_hook(lambda *_: self._stepped.record())
        optimizer.register_step_pre_hook(lambda *_: self._hold())

    def lerp(self, weight: float) -> None:
        self.wait()  # the landing place is free again
        self._stream.wait_event(self._stepped)
        with self._stream:
            for there, here in zip(self._theirs, self._landing, strict=True):
                here.copy_(there, non_blocking=True)
            self._copied = self._stream.record_event()
        self._adding = self._thread.submit(self._add, self._copied, weight)

    @torch.no_grad()
    def _add(self, copied: torch.Event, weight: float) -> None:
        copied.synchronize()
        torch._foreach_lerp_(self._mine, _as(self._landing, self._mine), weight)

    def _hold(self) -> None:
        if self._copied is not None:
            torch.accelerator.current_stream(self._theirs[0].device).wait_event(self._copied)

    def wait(self) -> None:
        if self._adding is not None:
            self._adding.result()
            self._adding = None
