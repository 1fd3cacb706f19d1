"""The gradient noise scale: the largest useful batch size (McCandlish et al. 2018, appendix A).

The sensor knows about ranks and micro-batches; the estimator works on plain numbers:

>>> sensor, noise = Sensor(accelerator, model), NoiseScale()
>>> with sensor.measuring():                           # one whole step
...     for batch in group:
...         accelerator.backward(...); sensor.micro_batch(weight_of_batch)
>>> noise.add(*sensor.read(global_weight, samples), norm=float(global_norm(parameters)))
>>> noise.value                                        # samples

A part is a share of the step, for example a micro-batch. The gradient of a part with weight w is G
plus noise of variance tr(S) / w. So |G|^2 and tr(S) follow from the squared norms of the parts'
gradients and of the step's gradient, which is their mean. B_simple = tr(S) / |G|^2.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from oneloop.basics.tensors import sharded_units
from oneloop.basics.wide_sums import wide_dtype


class Sensor:
    """Measures squared gradient norms of a step's parts; costs nothing in other steps.

    A part is a micro-batch of one rank. Under FSDP2, which first sums a rank's micro-batches, it is
    the rank's share of the step, unless gradients are ``passed``.

    Args:
        accelerator: Its ranks share the step; the loss scale of its scaler is undone.
        model: As prepared.
        passed: Under FSDP2, the caller passes the gradients of each micro-batch to :meth:`see`.
        summed: Gradients are summed over the ranks, not averaged as DDP and FSDP2 do by default.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        *,
        passed: bool = False,
        summed: bool = False,
    ) -> None:
        self._accelerator = accelerator
        self._means = 1 if summed else accelerator.num_processes
        units = sharded_units(model)
        if not passed:
            for unit in units:
                unit.set_custom_reduce_scatter(_MeasuredReduceScatter(self))
        # Without units, hooks see gradients before accumulation and DDP's buckets.
        self._hooked = [one for one in model.parameters() if one.requires_grad and not units]
        self._scale = 1.0  # of the loss

        # Of the measured step.
        self._on = False
        self._parts: list[tuple[Tensor, float]] = []  # squared norm, and weight
        self._norms: list[Tensor] = []  # of the current part's tensors
        self._weight = 0.0  # of the current part

    @contextmanager
    def measuring(self, on: bool = True) -> Iterator[None]:
        """Measure the gradients of one step in this context."""
        if not on:
            yield
            return
        self._parts = []
        self._norms = []
        self._weight = 0.0
        if self._accelerator.scaler is not None:
            self._scale = self._accelerator.scaler.get_scale()  # host sync
        with ExitStack() as stack:
            for parameter in self._hooked:
                stack.callback(parameter.register_hook(self.see).remove)
            self._on = True
            try:
                yield
            finally:
                self._on = False

    def see(self, gradient: Tensor) -> None:
        """Add one gradient tensor of the current part."""
        if self._on:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=wide))

    def micro_batch(self, weight: float) -> None:
        """Record that a micro-batch's backward is done; ``weight`` is its weight on this rank."""
        self._weight += weight
        if not self._norms:
            return  # FSDP2 reduces gradients only at the end of the step
        if self._weight > 0:
            self._parts.append((torch.stack(self._norms).square().sum(), self._weight))
        self._norms = []
        self._weight = 0.0

    def read(self, weight: float, samples: int) -> tuple[float, float, float]:
        """Return the statistics of the last measured step.

        Collective; one all-reduce, and host syncs.

        Args:
            weight: Weight of the global batch, by which the summed loss was divided.
            samples: Samples of the global batch.

        Returns:
            The mean squared norm of the parts' mean gradients, the mean of 1 / samples of a part,
            and 1 / samples of the step. NaN if all parts have weight 0; :meth:`NoiseScale.add`
            ignores NaN.
        """
        # Parts' gradients are divided by the step's weight, and scaled: undo both, and divide by
        # the part's weight.
        mine = [0.0, 0.0, float(len(self._parts))]
        for square, own in self._parts:
            undone = weight / (self._means * own * self._scale)
            mine[0] += float(square) * (undone * undone)  # host sync
            mine[1] += 1.0 / own
        self._parts = []
        device = self._accelerator.device
        sums = torch.tensor(mine, dtype=wide_dtype(device), device=device)
        square, inverse, count = self._accelerator.reduce(sums, "sum").tolist()  # host sync
        each = weight / samples  # mean weight of a sample
        count = count or math.nan
        return square / count, inverse / count * each, 1.0 / samples


class _MeasuredReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, which passes its input to the sensor."""

    def __init__(self, sensor: Sensor) -> None:
        super().__init__()
        self._sensor = sensor

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> Any:
        self._sensor.see(input_tensor)
        return super().__call__(output_tensor, input_tensor, *rest, **more)


class NoiseScale:
    """Estimator of the noise scale: the ratio of the means of tr(S) and |G|^2.

    The means are over the last ``window`` measurements; single ones are far too noisy."""

    def __init__(self, window: int = 64) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=window)

    def add(
        self, small_square: float, small_inverse: float, big_inverse: float, *, norm: float
    ) -> None:
        """Add the measurement of one step.

        The two unknowns |G|^2 and tr(S) follow from two gradient norms, of the parts and of the
        step (McCandlish et al. 2018, appendix A.1).

        Args:
            small_square: mean squared gradient norm of the parts.
            small_inverse: mean of 1 / samples of the parts.
            big_inverse: 1 / samples of the step.
            norm: gradient norm of the step.
        """
        if small_inverse == big_inverse:
            return  # one part says nothing about the noise
        square = norm * norm  # infinite if it overflows, where norm**2 is an error
        noise = (small_square - square) / (small_inverse - big_inverse)
        signal = square - noise * big_inverse
        if math.isfinite(noise) and math.isfinite(signal):
            self._measured.append((noise, signal))

    @property
    def value(self) -> float | None:
        """B_simple in samples; None before the first measurement, or if the noise is too large."""
        if not self._measured:
            return None
        noise, signal = (sum(values) for values in zip(*self._measured, strict=True))
        return noise / signal if noise > 0 and signal > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements in the window."""
        return {"found": [list(pair) for pair in self._measured]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the measurements."""
        self._measured.clear()
        self._measured.extend(state["found"])
