"""Memory of this process."""

import torch

from oneloop.basics.system.memory import peak_host_memory


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: of the GPU, or of the host without one."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return peak_host_memory()
