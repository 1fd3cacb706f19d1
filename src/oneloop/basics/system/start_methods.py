"""How new Python processes start: by fork where that is safe, else by spawn.

>>> pool = ProcessPoolExecutor(4, start_context())
"""

import multiprocessing
import sys
from mmap import mmap
from multiprocessing.context import SpawnContext, SpawnProcess, get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np


def _reopened(array: "np.memmap[Any, Any]") -> Any:
    """Let a spawned process map the file of an array that is only read, instead of a copy."""
    mapped = isinstance(array.base, mmap) and array.mode == "r" and array.filename
    if not mapped or get_spawning_popen() is None:
        return array.__reduce_ex__(2)
    order = "C" if array.flags.c_contiguous else "F"
    return np.memmap, (array.filename, array.dtype, "r", array.offset, array.shape, order)


ForkingPickler.register(np.memmap, _reopened)


class _Spawned(SpawnProcess):
    """A spawned process, which imports the program only if that is not a module of oneloop.

    Those take seconds to import, and no process needs them.
    """

    alone = False  # whether the process does not import a script of the user's, either

    def start(self) -> None:
        program = sys.modules["__main__"]
        spec = program.__spec__
        ours = spec is not None and spec.name.partition(".")[0] == "oneloop"
        if not (ours or self.alone):
            super().start()
            return

        # multiprocessing imports nothing in the new process if the program has no name.
        file = program.__dict__.pop("__file__", None)
        program.__spec__ = None
        try:
            super().start()
        finally:
            program.__spec__ = spec
            if file is not None:
                program.__file__ = file


class _SpawnedAlone(_Spawned):
    alone = True


def start_context(*, alone: bool = False) -> Any:
    """Return the start method of new processes: fork on Linux, spawn elsewhere.

    The libraries of macOS start threads, which makes fork unsafe. With spawn, the function of a new
    process and its arguments must be picklable.

    Args:
        alone: the process needs no class of a script that is running: spawn does not import it. (A
            script that trains as soon as it is imported would do so in the process, too.)
    """
    if not spawns():
        return multiprocessing.get_context("fork")
    context: Any = SpawnContext()
    context.Process = _SpawnedAlone if alone else _Spawned
    return context


def spawns() -> bool:
    """Return whether new processes are spawned: they take seconds, and inherit nothing."""
    return sys.platform != "linux"
