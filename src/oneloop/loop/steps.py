"""The steps of a run: micro-batches that are loaded ahead, and a host all-reduce before each."""

import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.heartbeats import BEATS, EPOCH, TRAINING
from oneloop.data.step_batches import Group, groups
from oneloop.loop.training_state import State
from oneloop.machine.fsdp2_units import Units, agree, disagreement

_AHEAD = 3  # steps whose samples may be loaded before the current one ends


class _Exchange(NamedTuple):
    """A step whose all-reduce is in progress."""

    group: Group  # its micro-batches on this rank
    sums: Tensor  # flags for stop, save and error; weights; hashes of FSDP2 units
    work: Any  # the collective


class StepBatches:
    """An endless iterator over this rank's micro-batches, by step.

    Each step has the total weight of its global batch, whether any rank got a stop request, and
    whether the time for a save has come. Each step makes one small all-reduce on the host, while
    the previous step trains. If a save fails on any rank, all ranks finish that save first.

    Args:
        state: its position decides which samples come next. The ranks share errors of its saves.
        units: under FSDP2, the ranks compare those that ran.

    Raises:
        OSError: too many saves in a row have failed.
    """

    def __init__(self, state: State, units: Units) -> None:
        self._job = state.job
        self._run = state.run
        self._count = state.count
        self._saves = state.checkpoints
        self._units = units
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
        job = self._job
        run = self._run
        machine = job.recipe.machine
        self._restart = True
        BEATS.enter(self._phase())
        while self._restart:
            self._restart = False
            loaded = groups(
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
            for group in self._summed(self._timed(loaded)):
                # Report progress to the supervisor.
                BEATS.beat()
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

    def _summed(self, groups: Iterable[Group]) -> Iterator[Group]:
        """Yield each step with its weight and its flags, summed over the ranks."""
        run = self._run
        self._next = None
        for group in groups:
            # Does rank 0's clock ask for a save? Count the time from now on.
            now = time.monotonic()
            timed = run.main and now - self._saved_at >= self._job.intervals.save_seconds
            if timed:
                self._saved_at = now

            # Flags: has this rank a stop request, is a save due, has one failed?
            flags = (run.stopping.requested(), timed, self._saves.poll() is not None)
            weights = group.addends(run.rank, run.ranks)
            hashes = self._units.hashes() if run.sharded else []
            addends = [*map(float, flags), *weights, *hashes]

            # One rank agrees with itself. Of several, start the all-reduce of each step before the
            # previous step is yielded: it runs while that one trains, so no rank waits for it.
            agreed = addends
            if run.host is not None:
                sums = torch.tensor(addends, dtype=torch.float64)
                work = dist.all_reduce(sums, group=run.host, async_op=True)
                before: _Exchange | None = self._next
                self._next = _Exchange(group, sums, work)
                self._pending_hashes = len(hashes)
                if before is None:
                    continue
                before.work.wait()
                group = before.group
                agreed = before.sums.tolist()

            # Set what the ranks agreed on.
            stop, save, failed, *totals = agreed
            group.total = rounded_sum(totals[: len(weights)])
            group.stop = bool(stop)
            group.save = self._save_flag = bool(save)
            # If a save failed on some rank, all ranks finish it, and raise if too many failed.
            if failed:
                self._saves.finish()
            yield group

            # The exchange in progress belongs to a step that is dropped: finish it, since every
            # rank has started it.
            if self._restart:
                if self._next is not None:
                    self._next.work.wait()
                return
