"""The room that knows the operating system: processes, memory, files and signals.

No other file of oneloop asks which system runs it, or uses what only some systems have. On Linux
the answers come from the kernel's files, which takes microseconds; psutil answers on other systems.
This file imports nothing that a system could lack, so that programs can call it first.
"""

import sys

_NOT_SUPPORTED = (
    "oneloop does not run on Windows. It needs fork, POSIX signals and POSIX file locks, which "
    "Windows lacks. Use the Windows Subsystem for Linux: run wsl --install in PowerShell, open the "
    "Linux terminal, and install oneloop there as on Linux."
)


def check_system() -> None:
    """Raise ImportError on a system without what oneloop needs."""
    if sys.platform == "win32":
        raise ImportError(_NOT_SUPPORTED)


def exit_if_not_supported() -> None:
    """Print the message of :func:`check_system` on such a system, and exit with code 2."""
    try:
        check_system()
    except ImportError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        sys.exit(2)
