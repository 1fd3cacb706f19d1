"""Memory of this process."""

import resource
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of the GPU, or of the host without one.

    On an Apple GPU (mps), which reports no peak, it is the memory that the driver holds now.

    Args:
        device: that trains.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def anonymous_memory() -> int:
    """Return the bytes of host memory of this process without mapped files; 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024  # it is in kB
    return 0
