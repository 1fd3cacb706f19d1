"""Fetch checkpoints of a mirror, on all ranks together: each block once per host, if a rank of the host needs it."""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from oneloop.basics.bucket import Bucket
from oneloop.checkpoint.mirror import Copy, Span, fetch_base, folder_of, steps_in
from oneloop.checkpoint.store import Store, name_of, step_of

Needs = Callable[[Path], Iterable[Span]]


def no_needs(folder: Path) -> Iterable[Span]:
    """Return nothing: without a mirror, nothing is fetched."""
    return ()


class Fetcher:
    """Fetches checkpoints into hidden folders of a run's ``store``. ``gather`` gathers a value of all ranks, ``leader``
    is the first rank of this host, and ``say`` reports damaged checkpoints on rank 0."""

    def __init__(
        self,
        bucket: Bucket,
        store: Store,
        *,
        rank: int,
        leader: int,
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._bucket, self._store, self._rank, self._leader = bucket, store, rank, leader
        self._gather, self._say = gather, say
        self.damaged: list[int] = []  # steps of damaged checkpoints in the mirror

    def _agreed(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks. Raises ValueError on all of them if one fails."""
        try:
            mine = (act(), "")
        except (OSError, ValueError) as error:
            mine = (None, f"{error} (rank {self._rank})")
        every = self._gather(mine)
        if wrong := [problem for _, problem in every if problem]:
            raise ValueError("; ".join(wrong[:3]))
        return [result for result, _ in every]

    def newest(self, own: Path | None, needs: Needs) -> Path | None:
        """Return a copy of the newest intact checkpoint after ``own``, with what the ranks of this host need; None if
        there is none. Log damaged ones. Collective. Raises ValueError if only damaged ones are there."""

        def step() -> int | None:
            steps = [step for step in steps_in(self._bucket) if step not in self.damaged]
            return max((step for step in steps if own is None or step > step_of(own)), default=None)

        while (chosen := self._agreed(lambda: step() if self._rank == 0 else None)[0]) is not None:
            try:
                return self.fetch(chosen, needs)
            except ValueError as error:
                self.damaged.append(chosen)
                if self._rank == 0:
                    place = f"{self._bucket.address}/{folder_of(chosen)}"
                    self._say(f"checkpoint {place} cannot be used, and was skipped: {error}")
        if self.damaged and own is None:
            raise ValueError(f"no intact checkpoint is left in {self._bucket.address}; choose another address")
        return None

    def fetch(self, step: int, needs: Needs) -> Path:
        """Return a copy of a checkpoint. Collective. Raises ValueError if it is damaged, or a rank cannot read it."""
        path = self._store.root / f".{name_of(step)}.{self._leader}.fetched"
        copies: list[Copy] = []

        def begin() -> None:
            copies.append(Copy(self._bucket, folder_of(step), path))
            if self._rank == self._leader:
                self._store.sweep(f".{self._leader}.fetched")
                copies[0].begin()
                fetch_base(self._bucket, copies[0].manifest, self._store.root.parent)

        self._agreed(begin)
        listed = self._agreed(lambda: (self._leader, copies[0].blocks(needs(path))))
        on_host = [blocks for leader, blocks in listed if leader == self._leader]
        mine = sorted({*chain(*on_host)})[self._rank - self._leader :: len(on_host)]
        self._agreed(lambda: copies[0].fill(mine))
        return path
