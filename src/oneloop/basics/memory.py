"""Memory of this process."""

import torch

from oneloop.basics.system.memory import peak_host_memory


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
    return peak_host_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    known = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)
