"""Python's garbage collection at the same step on all ranks, instead of whenever each of them happens to need it.

One rank that collects makes all others wait at the next collective; at 1,000 ranks some rank always does.

>>> with scheduled_garbage() as collect:
...     for step in range(steps):
...         ...
...         if step % 1000 == 0:
...             collect()
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def scheduled_garbage(on: bool = True) -> Iterator[Callable[[], object]]:
    """In here nothing is collected but by calling what is yielded; afterwards all is as before.

    What exists at the start (modules, the model) is set aside for good: it is never looked through again.
    """
    before = gc.isenabled()
    if on:
        gc.freeze()
        gc.disable()
    try:
        yield gc.collect if on else (lambda: None)
    finally:
        if on:
            gc.unfreeze()
            if before:
                gc.enable()
