"""The row groups that the fetcher holds, and which of them make room for others."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneloop.tasks.rows.remote.range_file import GroupRequest

_NEWEST = 4  # groups that no plan needs, and that are kept even if the budget is used up


class FetchJob:
    """A row group: to be fetched, being fetched, or there."""

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.size = request.size  # bytes that it takes from the budget
        self.footer: Any = None
        self.ranges: list[tuple[int, int]] = []
        self.begun: set[int] = set()  # numbers of the ranges; -1: the footer
        self.parts: dict[int, bytes] = {}  # fetched bytes by their offset
        self.path: Path | None = None  # the file, once the group is there
        self.error: Exception | None = None
        self.waiting: list[float] = []  # since when processes wait
        self.trouble = ""  # the last error that a further try may overcome

    @property
    def ended(self) -> bool:
        return self.path is not None or self.error is not None


class Room:
    """The bytes of the groups that the host keeps, and what can be dropped for another.

    What no plan needs is dropped first, by the time of its last use; then what is needed later than
    the other, the farthest use first (Belady 1966).

    Args:
        jobs: all groups, the one that was used last at the end.
        next_use: step of the next use of each needed group.
        users: the plans that need a group.
    """

    def __init__(
        self,
        jobs: Iterable[FetchJob],
        next_use: Mapping[GroupRequest, int],
        users: Mapping[GroupRequest, Sequence[int]],
    ) -> None:
        self._next_use = next_use
        self._users = users
        self._held: defaultdict[Any, int] = defaultdict(int)
        self._shares: defaultdict[int, float] = defaultdict(float)  # bytes, by plan
        self._spare: defaultdict[Any, list[FetchJob]] = defaultdict(list)
        # the farthest use at the end
        self._later: defaultdict[Any, list[FetchJob]] = defaultdict(list)
        for job in jobs:
            self.take(job.request, job.size)
            pool = pool_of(job.request)
            if job.waiting or (job.begun and not job.ended):
                continue
            kind = self._later if job.request in next_use else self._spare
            kind[pool].append(job)
        for later in self._later.values():
            later.sort(key=lambda job: next_use[job.request])

    def share_with(self, request: GroupRequest) -> float:
        """Return the bytes that one plan would hold with a group: that which holds least now.

        A group that several plans need counts for each of them in part.
        """
        users = self._users[request]
        least = min(self._shares[number] for number in users)
        return least + request.size / len(users)

    def take(self, request: GroupRequest, size: int | None = None) -> None:
        """Count the bytes of a group (default: those of its footer; negative: it is dropped)."""
        size = request.size if size is None else size
        self._held[pool_of(request)] += size
        users = self._users.get(request, ())
        for number in users:
            self._shares[number] += size / len(users)

    def make(self, request: GroupRequest) -> list[FetchJob] | None:
        """Return what to drop for a group; None: what could be dropped is needed before it."""
        pool = pool_of(request)
        spare = self._spare[pool]
        later = self._later[pool]
        missing = self._held[pool] + request.size - request.budget
        dropped = list[FetchJob]()
        for job in [*spare, *reversed(later)]:
            needed_at = self._next_use.get(job.request, math.inf)
            if missing <= 0 or needed_at <= self._next_use[request]:
                break
            dropped.append(job)
            missing -= job.size
        if missing > 0:
            return None
        for job in dropped:
            (spare if job in spare else later).remove(job)
            self.take(job.request, -job.size)
        return dropped

    def over(self) -> Iterator[FetchJob]:
        """Yield what no plan needs while the budget is exceeded, apart from the newest ones."""
        for pool, spare in self._spare.items():
            for job in spare[:-_NEWEST]:
                if self._held[pool] > job.request.budget:
                    self._held[pool] -= job.size
                    yield job


def pool_of(request: GroupRequest) -> Any:
    """Return what the groups of one budget have in common."""
    return request.address, request.columns
