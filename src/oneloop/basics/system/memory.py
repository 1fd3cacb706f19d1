"""Memory of the host: what this process uses, and memory that processes share."""

import os
import resource
import sys
import tempfile
from pathlib import Path


def peak_host_memory() -> int:
    """Return the peak host memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def anonymous_memory() -> int:
    """Return the bytes of host memory of this process without mapped files."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024  # it is in kB
    import psutil

    return int(psutil.Process().memory_full_info().uss)  # what no other process uses


def nameless_file(name: str) -> int:
    """Return the descriptor of a new file that only processes which get the descriptor can open.

    On Linux it is in memory.

    Args:
        name: for lists of open files.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
