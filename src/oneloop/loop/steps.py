"""The steps of a run: micro-batches that are loaded ahead, and a host all-reduce before each."""

import time
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.heartbeats import BEATS, EPOCH, TRAINING
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.data.step_batches import Group, groups
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.counters import Counters
from oneloop.loop.gradients import Gradients
from oneloop.machine.fsdp2_units import agree, disagreement

NO_WEIGHT = (
    "the total weight of the global batch is 0, so the mean loss is undefined; check task.weight()"
)
_AHEAD = 3  # steps whose samples may be loaded before the current one ends
_KNOWN = 50  # steps in a row after which collectives get a time-out
_LEAST = 1200.0  # seconds of this time-out, at least: more than a wait for data
_MANY = 20  # hang limits of this time-out, if they are longer


class _Exchange(NamedTuple):
    """A step whose all-reduce is in progress."""

    group: Group  # its micro-batches on this rank
    sums: Tensor  # flags for stop, save and error; weights; hashes of FSDP2 units
    work: Any  # the collective


class _Agreed(NamedTuple):
    """A step, and what the ranks agreed on: sums over the ranks."""

    group: Group  # its micro-batches on this rank
    total: float  # weight of its global batch
    stop: float  # ranks with a stop request
    save: float  # 1 if rank 0's clock asks for a save
    failed: float  # ranks whose save has failed


class Steps:
    """An endless iterator over this rank's micro-batches, by step.

    Each step has the total weight of its global batch, whether any rank got a stop request, and
    whether the time for a save has come. Each step makes one small all-reduce on the host, while
    the previous step trains. If a save fails on any rank, all ranks finish that save first.

    Args:
        job: what the recipe describes.
        run: this process.
        count: its position decides which samples come next.
        saves: whose errors the ranks share.
        gradients: under FSDP2, the ranks compare the units that ran.

    Raises:
        OSError: too many saves in a row have failed.
    """

    def __init__(
        self, job: Job, run: Run, count: Counters, saves: Checkpoints, gradients: Gradients
    ) -> None:
        self._job = job
        self._run = run
        self._count = count
        self._saves = saves
        self._units = gradients.units
        self._restart = False  # whether to drop the steps that were loaded ahead
        self._save_flag = False  # whether the time for a save has come after the current step
        self._saved_at = time.monotonic()
        self._next: _Exchange | None = None
        self._pending_hashes = 0  # number of hashes in its sums that are not yet compared
        self._waited = 0.0  # seconds of waiting for data since the last :meth:`data_wait`
        self._loaded = 0  # steps loaded since then

    def __iter__(self) -> Iterator[Group]:
        steps = self._agreed()
        self._run.closing.callback(steps.close)
        return steps

    def begin_afresh(self) -> None:
        """Drop the steps that were loaded ahead.

        Collective: call on every rank, at the same step."""
        self._restart = True
        self._run.be_patient()  # another rank may still load the checkpoint

    def save_later(self) -> None:
        """Save after the next step, if the time had come after this one, which failed."""
        if self._save_flag:
            self._saved_at = float("-inf")

    def data_wait(self) -> float:
        """Return the seconds per step that this rank alone has waited for data.

        They count since the last call.
        """
        wait = self._waited / (self._loaded or 1)
        self._waited = 0.0
        self._loaded = 0
        return wait

    def _timed(self, groups: Iterator[Group]) -> Iterator[Group]:
        began = time.perf_counter()
        for group in groups:
            self._waited += time.perf_counter() - began
            self._loaded += 1
            yield group
            began = time.perf_counter()

    def _is_save_time(self) -> bool:
        """Return whether rank 0's clock asks for a save; count the time from now on."""
        if not self._run.main:
            return False
        now = time.monotonic()
        due = now - self._saved_at >= self._job.intervals.save_seconds
        if due:
            self._saved_at = now
        return due

    def compare_fsdp2_units(self) -> None:
        """Under FSDP2, check that all ranks ran the same units in the pending step.

        Wait for the all-reduce in progress since that step; if there is none, make one.
        Collective: call on every rank.

        Raises:
            Inexact: the ranks ran different units.
        """
        host = self._run.host
        if not self._run.sharded or host is None:
            return
        if self._pending_hashes and self._next is not None:
            self._next.work.wait()
            sums = self._next.sums[-self._pending_hashes :]
        else:
            sums = torch.tensor(self._units.hashes(), dtype=torch.float64)
            dist.all_reduce(sums, group=host)
        self._pending_hashes = 0
        if not agree(sums.tolist(), self._run.ranks):
            raise disagreement(self._run.gathered(self._units.last))

    def _agreed(self) -> Generator[Group]:
        """Yield the steps. After a rewind, begin again at the position of the counters."""
        self._restart = True
        BEATS.enter(self._phase())
        while self._restart:
            self._restart = False
            for agreed in self._summed(self._timed(self._groups())):
                # A save failed on some rank: all ranks finish it, and raise if too many failed.
                if agreed.failed:
                    self._saves.finish()

                group = agreed.group
                group.total = agreed.total
                group.stop = bool(agreed.stop)
                group.save = bool(agreed.save)
                self._save_flag = group.save

                # Report progress. Once step times are known, limit the time of collectives.
                BEATS.beat()
                self._run.in_a_row += 1
                if self._run.in_a_row == _KNOWN:
                    limit = max(_LEAST, _MANY * BEATS.limit(1.0))
                    self._run.wait_at_most(timedelta(seconds=limit))
                yield group

                phase = self._phase()
                if phase != BEATS.now_in:
                    BEATS.enter(phase)

    def _phase(self) -> str:
        """Return EPOCH if samples of a new epoch may be loaded next, which may be slow.

        Else return TRAINING.
        """
        position = self._count.position
        length = len(self._job.train_set)
        ahead = position + _AHEAD * self._job.layout.size
        if (position - 1) // length == ahead // length:
            return TRAINING
        return EPOCH

    def _groups(self) -> Iterator[Group]:
        job = self._job
        run = self._run
        machine = job.recipe.machine
        return groups(
            job.train_set,
            job.collate,
            job.order,
            job.layout,
            rank=run.rank,
            seed=job.recipe.seed,
            start=self._count.position,
            workers=run.workers(machine.workers),
            pinned=machine.pinned,
            device=run.device,
        )

    def _summed(self, groups: Iterable[Group]) -> Iterator[_Agreed]:
        """Yield each step with its weight and its flags, summed over the ranks."""
        requested = self._run.stopping.requested
        due = self._is_save_time
        poll = self._saves.poll

        # One rank agrees with itself.
        if self._run.host is None:
            for group in groups:
                total = rounded_sum(group.addends(0, 1))
                yield _Agreed(group, total, requested(), due(), poll() is not None)
                if self._restart:
                    break
            return

        # Start the all-reduce of each step before the previous step is yielded: it runs while that
        # one trains, so nobody waits for it.
        self._next = None
        for group in groups:
            hashes = self._units.hashes() if self._run.sharded else []
            weights = group.addends(self._run.rank, self._run.ranks)
            mine = torch.tensor(
                [requested(), due(), poll() is not None, *weights, *hashes], dtype=torch.float64
            )
            work = dist.all_reduce(mine, group=self._run.host, async_op=True)
            before: _Exchange | None = self._next
            self._next = _Exchange(group, mine, work)
            self._pending_hashes = len(hashes)
            if before is None:
                continue

            before.work.wait()
            stop, save, failed, *sums = before.sums.numpy().tolist()
            total = rounded_sum(sums[: len(weights)])
            yield _Agreed(before.group, total, stop, save, failed)

            # The exchange in progress belongs to a step that is dropped: finish it, since every
            # rank has started it.
            if self._restart:
                self._next.work.wait()
                return
