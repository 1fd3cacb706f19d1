"""Memory of the host: what this process uses, and memory that processes share."""

import os
import resource
import sys
import tempfile


def peak_host_memory() -> int:
    """Return the peak host memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
