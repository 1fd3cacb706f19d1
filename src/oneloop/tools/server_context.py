"""The start method of processes with slow imports."""

import multiprocessing
from collections.abc import Sequence
from typing import Any

from oneloop.basics.system.start_methods import spawns, start_context


def server_context(preload: Sequence[str]) -> Any:
    """Return the start method of processes with slow imports.

    On Linux, each is a fork of a server process that has done the imports, and nothing else.
    Elsewhere it is :func:`start_context`.

    Args:
        preload: names of the modules to import.
    """
    if spawns():
        return start_context()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context
