"""What the ranks of a run tell one another, on the host: it never waits for a device."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from oneloop.basics.beats import BEATS, TRAINING
from oneloop.basics.errors import BAD_INPUT, BadInput
from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.text import printable
from oneloop.data.groups import Group
from oneloop.machine.checks import Checks, agree, disagreement
from oneloop.run.ending import leave_at_once

_PATIENCE = 15.0
"""seconds in which the others hear of what is wrong on one rank"""
_KNOWN, _LEAST, _MANY = 50, 600.0, 20
"""steps after which collectives get a time-out of the run's own: seconds at least, and times what names a hang"""


class Saves(Protocol):
    """What :meth:`Agreement.agreed` asks of checkpoints."""

    def poll(self) -> object | None:
        """This rank's trouble with the save under way, without a wait."""

    def finish(self) -> object:
        """Waits for that save, on all ranks, and says what went wrong."""


class Agreement:
    """The ranks of a run, as one of them talks to the others.

    Args:
        ranks: how many there are; with several, torch.distributed is initialized.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._host = cast("dist.ProcessGroup | None", dist.new_group(backend="gloo") if ranks > 1 else None)
        self._afresh = False
        self.checks: Checks | None = None
        """whose signs the ranks compare, step by step"""
        self._coming: tuple[Group, Tensor, Any] | None = None
        """the group after the one that trains, and the sum that is on its way for it"""
        self._signs = 0
        """how many of its numbers are signs that were not compared yet"""

    # --- at every step ---

    def agreed(self, groups: Callable[[], Iterable[Group]], saves: Saves, told: Callable[[], bool]) -> Generator[Group]:
        """The groups, each with the ``total`` weight of its global batch and the ``stop`` that any rank was told.

        One small sum a step, on its way while the step before trains. Where a rank has trouble with a save, all of them
        finish it first. After :meth:`begin_afresh` the groups are asked for anew.

        Args:
            groups: makes this rank's endless groups.
            saves: the run's checkpoints.
            told: whether this rank was told to stop.

        Raises:
            OSError: too many saves in a row have failed.
        """
        self._afresh, steps = True, 0
        BEATS.enter(TRAINING)
        while self._afresh:
            self._afresh = False
            for group, total, stop, trouble in self._summed(groups(), saves, told):
                if trouble:
                    saves.finish()
                group.total, group.stop = total, bool(stop)
                BEATS.beat()
                steps += 1
                if steps == _KNOWN and self._host is not None:
                    self._wait_at_most(max(_LEAST, _MANY * BEATS.limit(1.0)))
                yield group

    def _wait_at_most(self, seconds: float) -> None:
        """Of collectives: a second net, where nothing watches the processes of a run."""
        set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before 2.15
        for group in (dist.group.WORLD, self._host):
            set_timeout(timedelta(seconds=seconds), group)

    def begin_afresh(self) -> None:
        """What :meth:`agreed` has loaded ahead is dropped. Every rank must get here, at the same step."""
        self._afresh = True

    def _summed(
        self, groups: Iterable[Group], saves: Saves, told: Callable[[], bool]
    ) -> Iterator[tuple[Group, float, float, float]]:
        """Each group with the sums over the ranks of its weight, the stop flag and the trouble flag."""
        if self._host is None:
            for group in groups:
                total = rounded_sum(group.weights) if group.apart else group.weight
                yield group, total, told(), saves.poll() is not None
                if self._afresh:
                    break
            return
        self._coming = None
        for group in groups:
            signs, weights = self.checks.signs() if self.checks is not None else [], self._weights(group)
            mine = torch.tensor([told(), saves.poll() is not None, *weights, *signs], dtype=torch.float64)
            work = dist.all_reduce(mine, group=self._host, async_op=True)
            before: tuple[Group, Tensor, Any] | None = self._coming
            self._coming, self._signs = (group, mine, work), len(signs)
            if before is not None:
                before[2].wait()
                stop, trouble, *sums = before[1].numpy().tolist()
                yield before[0], rounded_sum(sums[: len(weights)]), stop, trouble
                if self._afresh:
                    self._coming[2].wait()
                    return

    def confirm(self) -> None:
        """All ranks ran the same in the step that is to be accepted. Collective: call on every rank.

        Waits for the sum that is on its way since that step was made; if there is none yet, makes one.

        Raises:
            Inexact: they did not (FSDP2).
        """
        if self.checks is None or self._host is None:
            return
        if self._signs and self._coming is not None:
            self._coming[2].wait()
            sums = self._coming[1][-self._signs :]
        else:
            sums = torch.tensor(self.checks.signs(), dtype=torch.float64)
            dist.all_reduce(sums, group=self._host)
        self._signs = 0
        if not agree(sums.tolist(), self.ranks):
            raise disagreement(self.gathered(self.checks.units.last))

    def _weights(self, group: Group) -> list[float]:
        """What the ranks sum up: the weight; or where it shall be the same bits for every split each one in its own
        place, where nothing is added to it."""
        if not group.apart:
            return [group.weight]
        mine, rank = len(group.weights), dist.get_rank(self._host)
        return [0.0] * (mine * rank) + group.weights + [0.0] * (mine * (self.ranks - rank - 1))

    # --- now and then ---

    def union(self, flags: list[bool]) -> list[bool]:
        """Which of these flags are set on any rank. Collective: call on every rank."""
        told = torch.tensor(flags, dtype=torch.uint8)
        if self._host:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._host)
        return list(map(bool, told.tolist()))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Every rank must get here."""
        return self.union([flag])[0]

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks. Every rank must get here."""
        told = torch.tensor(values, dtype=torch.float64)
        if self._host:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._host)
        return list(told.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values = [value]
        if self._host:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self._host)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self._host:
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """What one rank finds wrong in here is an error on all of them, so that they end together.

        Raises:
            BadInput: on every rank, with the first rank's message.
        """
        message: str | None = None
        try:
            yield
        except BadInput as error:
            message = str(error)
        except (ValueError, ImportError) as error:
            message = f"{error}{where(error)}"
        with _not_alone(message if self.ranks > 1 else None):
            several = self.gathered(message)
        for told in several:
            if told is not None:
                raise BadInput(told)


@contextmanager
def _not_alone(message: str | None) -> Iterator[None]:
    """Where the other ranks never come to hear what is wrong on this one (they wait for it in a collective of the
    model's), this process says it itself and ends, and the launcher ends the others."""

    def say() -> None:
        print(printable(f"oneloop: rank {os.environ.get('RANK', '0')}: {message}"), file=sys.stderr, flush=True)
        leave_at_once(BAD_INPUT)

    waiting = threading.Timer(_PATIENCE, say)
    waiting.daemon = True
    if message is not None:
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def where(error: BaseException) -> str:
    """Where an error of someone else's code was raised, so that a bug there is not taken for a typing error: the
    innermost line that is neither of a library nor of oneloop."""
    frames = traceback.extract_tb(error.__traceback__)
    if _ours(frames[-1].filename):
        return ""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not _ours(frame.filename) and not frame.filename.startswith(libraries)]
    frame = (own or frames)[-1]
    return f" ({frame.filename}:{frame.lineno})"


def _ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])
