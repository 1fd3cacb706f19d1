"""Fetches ahead which row groups a rank will need, in threads."""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue

from oneloop.basics.launcher import local_ranks
from oneloop.tasks.rows.remote.fetch_plan import NeededGroups
from oneloop.tasks.rows.remote.remote_file import RowGroup
from oneloop.tasks.rows.remote.row_group_cache import RowGroupCache

# Requests of a host at the same time. S3 sends 60 to 90 MB/s on a connection, so 16 fill 1 GB/s. At
# a latency of 50 ms, 50 MB must be under way for that: 16 requests of 3 MB or more.
_REQUESTS = 16
_PAUSE = 0.02  # seconds between two looks at the plan
_NAMES = 1 << 14  # groups whose names in the cache are kept
_END = 2.0  # seconds in which the threads end, unless a store does not answer


class FetchAhead:
    """Fetches the row groups of a plan, those that are needed first before the others.

    Args:
        cache: of the row groups.
        needed: the plan.
        group_of: returns a row group by its number.
    """

    def __init__(
        self,
        cache: RowGroupCache,
        needed: NeededGroups,
        group_of: Callable[[int], RowGroup],
    ) -> None:
        self._cache = cache
        self._needed = needed
        self._group_of = lru_cache(_NAMES)(group_of)
        self._name = f"{os.getpid()}-{id(self)}"
        self._step: int | None = 0
        self._moved = threading.Event()
        self._steps: dict[RowGroup, int] = {}  # of the next use of each group
        self._queue = SimpleQueue[RowGroup | None]()
        works = [self._plan] + [self._fetch] * max(1, _REQUESTS // local_ranks())
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        # A thread that runs while Python ends would abort the process.
        atexit.register(self.close)

    def advance(self, step: int) -> None:
        """Report the first step whose samples were not read yet, counted from the start."""
        self._step = step
        self._moved.set()

    def close(self) -> None:
        """Drop the plan."""
        import pyarrow

        atexit.unregister(self.close)
        self._step = None
        self._moved.set()
        until = time.monotonic() + _END
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        # Arrow keeps the memory of threads that have ended.
        pyarrow.default_memory_pool().release_unused()

    def _plan(self) -> None:
        """Queue what is needed next and has room. Runs in a thread."""
        while (step := self._step) is not None:
            steps = self._needed.advance(step)
            self._steps = {self._group_of(group): first for group, first in steps.items()}
            # If the disk is full, the next read of a sample raises.
            with suppress(OSError):
                for group in self._cache.claim(self._name, self._steps):
                    self._queue.put(group)
            if self._needed.complete(step):
                self._moved.wait()
                self._moved.clear()
                time.sleep(_PAUSE)
        self._cache.end_plan(self._name)
        for _ in self._threads:
            self._queue.put(None)

    def _fetch(self) -> None:
        """Make what is queued. Runs in a thread."""
        while (group := self._queue.get()) is not None:
            if self._step is None or group not in self._steps:
                self._cache.release(group)
                continue
            # A process that needs the group tries again, and raises.
            with suppress(Exception):
                self._cache.make(group)
