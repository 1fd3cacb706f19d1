"""Up to which difference two results are equal, in the checks before a run."""

import math

import torch
from torch import nn

from oneloop.job.build import Job
from oneloop.launch.processes import Run


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
