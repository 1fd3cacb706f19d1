"""How much memory a process takes."""

import resource
from pathlib import Path

import torch


def peak_memory() -> int:
    """Most bytes of device memory this process has held at once; of host memory where there is no device."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def anonymous_memory() -> int:
    """Bytes of host memory that this process has for itself: not of mapped files. 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
