"""Copies of a mirror's checkpoints for a run: each host fetches what its ranks need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oneloop.basics.bucket import Bucket, StoreError
from oneloop.basics.exit_codes import Unavailable
from oneloop.checkpoint.mirror import (
    Block,
    Copy,
    Damaged,
    Needs,
    fetch_base,
    folder_of,
    steps_in,
)
from oneloop.checkpoint.saved_state import state_problems
from oneloop.checkpoint.store import Store, name_of, step_in, step_of


class Fetcher:
    """Fetches checkpoints of a mirror into hidden folders of a run: each block once per host.

    Args:
        address: of the mirror.
        store: the checkpoints folder of the run.
        rank: of this process.
        leader: the first rank of this host.
        gather: returns a value of all ranks, as a list.
        say: reports damaged checkpoints.
    """

    def __init__(
        self,
        address: str,
        store: Store,
        *,
        rank: int,
        leader: int,
        gather: Callable[..., Any],
        say: Callable[..., None],
    ) -> None:
        self._bucket = Bucket(address)
        self._store = store
        self._rank = rank
        self._leader = leader
        self._gather = gather
        self._say = say
        self.damaged: list[int] = []  # steps of damaged checkpoints in the mirror

    def source(self, path: Path) -> str:
        """Return where a checkpoint comes from."""
        step = step_in(path.name[1:].partition(".")[0])
        return f"{self._bucket.address}/{folder_of(step)}" if step is not None else str(path)

    def _agreed(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks. Collective.

        If one fails, raise its error on all ranks: Damaged only if no rank has another error.
        """
        mine: tuple[Any, ValueError | Unavailable | None]
        try:
            mine = (act(), None)
        except (OSError, ValueError) as error:
            kind: type[ValueError] | type[Unavailable] = ValueError
            if isinstance(error, Damaged):
                kind = Damaged
            elif isinstance(error, StoreError) and error.temporary:
                kind = Unavailable
            mine = (None, kind(f"{error} (rank {self._rank})"))
        every = self._gather(mine)
        wrong = [error for _, error in every if error is not None]
        if wrong:
            raise min(wrong, key=lambda error: isinstance(error, Damaged))
        return [result for result, _ in every]

    def newest(self, own: Path | None, needs: Needs) -> Path | None:
        """Return a copy of the newest intact checkpoint; log damaged ones. Collective.

        Args:
            own: the newest checkpoint of the run folder; only later ones are fetched.
            needs: returns the bytes that this rank reads.

        Returns:
            The copy, with what the ranks of this host need; None if there is none.

        Raises:
            ValueError: if only damaged ones are there, and none in the run folder.
        """
        steps = self.later(step_of(own) if own is not None else -1)
        for step in reversed(steps):
            try:
                return self.fetch(step, needs)
            except Damaged as error:
                self.damaged.append(step)
                if self._rank == 0:
                    place = f"{self._bucket.address}/{folder_of(step)}"
                    self._say(f"checkpoint {place} cannot be used, and was skipped: {error}")
        if steps and own is None:
            raise ValueError(
                f"no intact checkpoint is left in {self._bucket.address}; choose another address"
            )
        return None

    def later(self, than: int) -> list[int]:
        """Return the steps in the mirror after a step, except damaged ones. Collective."""
        steps = self._agreed(lambda: steps_in(self._bucket) if self._rank == 0 else [])[0]
        return [step for step in steps if step > than and step not in self.damaged]

    def fetch(self, step: int, needs: Needs) -> Path:
        """Return a copy of a checkpoint, with the bytes that the ranks of this host need.
        Collective.

        Raises:
            Damaged: on all ranks.
            Unavailable: on all ranks, if the mirror cannot be read now.
            ValueError: on all ranks, if one cannot read it.
        """
        path = self._store.root / f".{name_of(step)}.{self._leader}.fetched"
        copies = []

        # The first rank of each host creates the files, with all headers.
        def begin() -> None:
            copies.append(Copy(self._bucket, folder_of(step), path))
            if self._rank == self._leader:
                self._store.sweep(f".{self._leader}.fetched")
                copies[0].begin()
                wrong = state_problems(path)
                if wrong:
                    raise Damaged(wrong[0])
                fetch_base(self._bucket, copies[0].manifest, self._store.root.parent)

        self._agreed(begin)

        # The ranks of a host divide the blocks that any of them needs.
        listed = self._agreed(lambda: (self._leader, copies[0].blocks(needs(path))))
        on_host = [blocks for leader, blocks in listed if leader == self._leader]
        needed = sorted(set[Block]().union(*on_host))
        mine = needed[self._rank - self._leader :: len(on_host)]
        self._agreed(lambda: copies[0].fill(mine))
        return path
