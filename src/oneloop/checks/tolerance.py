"""Up to which difference two results are equal, in the checks before a run."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oneloop.basics.wide_sums import on_host
from oneloop.job.build import Job
from oneloop.launch.processes import Run

_NOISY = 10.0  # a distance may be this multiple of the control's


class Rounding(NamedTuple):
    """Relative differences that count as rounding."""

    tolerance: float  # of two results of the same sum
    least: float  # of two sums over the same samples
    most: float  # of these, even if the control differs more
    floor: float  # share of all gradients: a smaller gradient counts as this one

    def limit(self, noise: float) -> float:
        """Return the limit for two sums, by the largest distance of a control."""
        return max(self.least, min(_NOISY * noise, self.most))


# The error of float64 is about 1e-13 in deep models, and the start-up log promises 1e-6.
_FLOAT64 = Rounding(1e-9, 1e-9, 1e-6, 1e-4)
_FLOAT32 = Rounding(1e-4, 4e-6, 1e-3, 1e-2)  # 4e-6: 32 units of float32's last place
_HALF = Rounding(3e-2, 3e-2, 0.3, 1e-2)


def rounding_of(job: Job, run: Run, model: nn.Module) -> Rounding:
    """Return which differences count as rounding in this run."""
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    if narrow or run.accelerator.mixed_precision != "no":
        return _HALF
    if job.dtype is torch.float64:
        return _FLOAT64
    return _FLOAT32 if job.recipe.machine.matmul == "highest" else _HALF


def near(a: float, b: float, tolerance: float) -> bool:
    """Return whether a and b are equal up to ``tolerance``, relative to a.

    True if one is not finite.
    """
    if not math.isfinite(a + b):
        return True
    return abs(a - b) <= tolerance * abs(a)


def apart(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """Return the largest difference of pairs of tensors, relative to their largest finite value.

    Two values that are not finite are equal; the difference is infinite if only one of them is
    finite.
    """
    most = 0.0
    for pair in zip(some, others, strict=True):
        one, other = map(on_host, pair)
        if not torch.equal(one.isfinite(), other.isfinite()):
            return math.inf
        difference, *sizes = map(_largest, (one - other, one, other))
        most = max(most, difference / max(*sizes, math.ulp(0.0)))
    return most


def _largest(values: Tensor) -> float:
    """Return the largest absolute value that is finite."""
    if not values.numel():
        return 0.0
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max())
