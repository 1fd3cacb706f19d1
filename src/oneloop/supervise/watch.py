"""Rank 0's look at the whole run: names who stands still, and says when that must end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from oneloop.supervise.cause import Cause
from oneloop.supervise.judge import Standing, culprits, other_units, sentence

_GRACE = 10.0
"""seconds from the word that a rank stands still to the end of the run"""
_HINT = "; if it only takes its time: --machine.patience 3"


class Watch:
    """The state of all ranks, as far as it is known."""

    def __init__(self, ranks: int, *, say: Callable[[str], None]) -> None:
        self.ranks, self._say = ranks, say
        self._standings: dict[int, tuple[float, Standing]] = {}
        self._done: set[int] = set()
        self._named: list[int] = []
        self._until = 0.0

    def hear(self, standing: Standing) -> None:
        """How one rank gets on, by its own word."""
        self._standings[standing.rank] = time.monotonic(), standing

    def ended(self, rank: int) -> None:
        """This one needs not be looked at any more."""
        self._done.add(rank)

    def has_ended(self, rank: int) -> bool:
        return rank in self._done

    def begin_afresh(self) -> None:
        """What was heard before says nothing: the machine stood still."""
        self._standings.clear()
        self._named = []

    def look(self, ask_for_stacks: Callable[[bool], None]) -> Cause | None:
        """Return why the run must end, or None; print before that which rank hangs. ``ask_for_stacks`` collects all
        stacks, with True also of stopped processes."""
        known = self._known()
        late = culprits(known)
        if not late:
            if self._named:
                self._say(f"rank {', '.join(map(str, self._named))} goes on")
                self._named = []
            return None
        said = "; ".join(map(sentence, late)) + other_units(known)
        if not self._named:
            grace = _GRACE * late[0].patience
            self._named, self._until = [one.rank for one in late], time.monotonic() + grace
            self._say(f"{said}; the run ends in {grace:.0f} s if that goes on")
            ask_for_stacks(False)
            return None
        if time.monotonic() < self._until:
            return None
        ask_for_stacks(True)
        return Cause(late[0].rank, said + _HINT, stands=True)

    def _known(self) -> list[Standing]:
        """Of all ranks that have not ended; empty, as long as one has said nothing."""
        now, known = time.monotonic(), []
        for rank in set(range(self.ranks)) - self._done:
            if rank not in self._standings:
                return []
            at, told = self._standings[rank]
            one = Standing(**asdict(told))
            one.since += now - at
            one.silent += now - at
            known.append(one)
        return known
