"""How ``oneloop prove`` starts a run."""

import sys
from collections.abc import Callable, Sequence

from oneloop.basics.exit_codes import STOPPED
from oneloop.basics.system.signals import on_stops
from oneloop.launch.command import run_processes

Start = Callable[[Sequence[str], int], int]
"""runs ``oneloop launch`` with these arguments; output goes to the file descriptor; returns the
exit code"""
SECONDS = 1800.0  # time limit of one run


def start_run(arguments: Sequence[str], output: int) -> int:
    """Run ``oneloop launch``; see :data:`Start`."""
    try:
        return run_processes(
            arguments, module="oneloop.tools.prove.recorded_run", seconds=SECONDS, output=output
        )
    finally:  # run_processes() replaced the signal handlers
        on_stops(lambda *_: sys.exit(STOPPED))
