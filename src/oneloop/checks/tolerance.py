"""Up to which difference two results are equal, in the checks before a run."""

import math
from typing import NamedTuple

import torch
from torch import nn

from oneloop.job.build import Job
from oneloop.launch.processes import Run

_NOISY = 10.0  # a distance may be this multiple of the control's


class Limits(NamedTuple):
    """Limits of a relative distance that counts as rounding."""

    least: float
    most: float  # even if the control differs more

    def allow(self, noise: float) -> float:
        """Return the limit, by the largest distance of a control."""
        return max(self.least, min(_NOISY * noise, self.most))


# The error of float64 is about 1e-13 in deep models, and the start-up log promises 1e-6.
_FLOAT64 = Limits(1e-9, 1e-6)
_FLOAT32 = Limits(4e-6, 1e-3)  # 32 units of float32's last place
_HALF = Limits(3e-2, 0.3)


def near(a: float, b: float, tolerance: float) -> bool:
    """Return whether a and b are equal up to ``tolerance``, relative to a.

    True if one is not finite.
    """
    if not math.isfinite(a + b):
        return True
    return abs(a - b) <= tolerance * abs(a)


def tolerance_of(job: Job, run: Run, model: nn.Module) -> float:
    """Return the relative tolerance for rounding of sums."""
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    mixed = run.accelerator.mixed_precision != "no"
    if narrow or mixed or job.recipe.machine.matmul != "highest":
        return 3e-2
    if job.dtype is torch.float64:
        return 1e-9
    return 1e-4


def limits_of(job: Job, run: Run, model: nn.Module) -> Limits:
    """Return the limits of a distance between two sums over the same samples."""
    if job.dtype is torch.float64:
        return _FLOAT64
    return _HALF if tolerance_of(job, run, model) > 1e-3 else _FLOAT32
