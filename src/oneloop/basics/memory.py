"""How much memory a process takes."""

from __future__ import annotations

import resource

import torch


def peak_memory() -> int:
    """Most bytes of device memory this process has held at once; of host memory where there is no device."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
