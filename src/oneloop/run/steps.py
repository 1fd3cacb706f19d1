"""The steps of a run: micro-batches that are loaded ahead, and the host all-reduce before each
step."""

import time
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.heartbeats import BEATS, EPOCH, TRAINING
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.data.step_batches import Group, groups
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.machine.layout_checks import Checks, agree, disagreement
from oneloop.run.counters import Counters

NO_WEIGHT = (
    "the total weight of the global batch is 0, so the mean loss is undefined; check task.weight()"
)
_AHEAD = 3  # steps whose samples may be loaded before the current one ends
_KNOWN, _LEAST, _MANY = 50, 600.0, 20
"""time-out of collectives after _KNOWN steps: at least _LEAST seconds, or _MANY times the hang
limit"""


class Steps:
    """An endless iterator over this rank's micro-batches, by step. Each step has the total weight
    of its global batch, whether any rank got a stop request, and whether the time for a save has
    come.

    Each step makes one small all-reduce on the host, while the previous step trains. If a save
    fails on any rank, all ranks finish that save first. Raise OSError if too many saves in a row
    fail."""

    def __init__(
        self, job: Job, run: Run, count: Counters, saves: Checkpoints, checks: Checks
    ) -> None:
        self._job, self._run, self._count, self._saves = job, run, count, saves
        self._checks = checks if run.sharded else None
        self._restart = self._save_flag = False
        self._saved_at = time.monotonic()
        self._next: tuple[Group, Tensor, Any] | None = None
        """the micro-batches of the next step, and their all-reduce in progress"""
        self._pending_hashes = 0  # number of hashes in that sum that are not yet compared
        # seconds of waiting for data, and steps loaded, since :meth:`data_wait`
        self._waited, self._loaded = 0.0, 0

    def __iter__(self) -> Iterator[Group]:
        steps = self._agreed()
        self._run.closing.callback(steps.close)
        return steps

    def begin_afresh(self) -> None:
        """Drop the steps that were loaded ahead. Collective: call on every rank, at the same
        step."""
        self._restart = True

    def save_later(self) -> None:
        """Save after the next step, if the time had come after this one, which failed."""
        self._saved_at = float("-inf") if self._save_flag else self._saved_at

    def data_wait(self) -> float:
        """Return the seconds per step that this rank alone has waited for data since the last
        call."""
        waited, self._waited, loaded, self._loaded = self._waited, 0.0, self._loaded, 0
        return waited / (loaded or 1)

    def _timed(self, groups: Iterator[Group]) -> Iterator[Group]:
        began = time.perf_counter()
        for group in groups:
            self._waited, self._loaded = (
                self._waited + time.perf_counter() - began,
                self._loaded + 1,
            )
            yield group
            began = time.perf_counter()

    def _is_save_time(self) -> bool:
        """Return whether rank 0's clock asks for a save; count the time from now on."""
        due = (
            self._run.main and time.monotonic() - self._saved_at >= self._job.intervals.save_seconds
        )
        self._saved_at = time.monotonic() if due else self._saved_at
        return due

    def confirm(self) -> None:
        """Raise Inexact if the ranks ran different FSDP2 units in the pending step. Collective:
        call on every rank.

        Wait for the all-reduce in progress since that step; if there is none, make one."""
        host = self._run.host
        if self._checks is None or host is None:
            return
        if self._pending_hashes and self._next is not None:
            self._next[2].wait()
            sums = self._next[1][-self._pending_hashes :]
        else:
            sums = torch.tensor(self._checks.hashes(), dtype=torch.float64)
            dist.all_reduce(sums, group=host)
        self._pending_hashes = 0
        if not agree(sums.tolist(), self._run.ranks):
            raise disagreement(self._run.gathered(self._checks.units.last))

    def _agreed(self) -> Generator[Group]:
        self._restart, steps = True, 0
        BEATS.enter(self._phase())
        while self._restart:
            self._restart = False
            for group, total, stop, save, failed in self._summed(self._timed(self._groups())):
                if failed:
                    self._saves.finish()
                group.total, group.stop = total, bool(stop)
                group.save = self._save_flag = bool(save)
                BEATS.beat()
                steps += 1
                if steps == _KNOWN and self._run.host is not None:
                    self._wait_at_most(max(_LEAST, _MANY * BEATS.limit(1.0)))
                yield group
                if (phase := self._phase()) != BEATS.now_in:
                    BEATS.enter(phase)

    def _phase(self) -> str:
        """Return EPOCH if samples of a new epoch may be loaded next, which may be slow; else
        TRAINING."""
        position, length = self._count.position, len(self._job.train_set)
        ahead = position + _AHEAD * self._job.layout.size
        return TRAINING if (position - 1) // length == ahead // length else EPOCH

    def _groups(self) -> Iterator[Group]:
        job, run, machine = self._job, self._run, self._job.recipe.machine
        how: dict[str, Any] = {
            "workers": run.workers(machine.workers),
            "pinned": machine.pinned,
            "device": run.device,
        }
        how |= {"rank": run.rank, "seed": job.recipe.seed, "start": self._count.position}
        return groups(job.train_set, job.collate, job.order, job.layout, **how)

    def _wait_at_most(self, seconds: float) -> None:
        """Limit the time of collectives: a second safeguard, if no supervisor runs."""
        set_timeout = (
            getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
        )  # before 2.15
        for group in (dist.group.WORLD, self._run.host):
            set_timeout(timedelta(seconds=seconds), group)

    def _summed(
        self, groups: Iterable[Group]
    ) -> Iterator[tuple[Group, float, float, float, float]]:
        """Yield each step with its weight, and its flags for stop, save and error, summed over the
        ranks."""
        requested, due, poll = self._run.stopping.requested, self._is_save_time, self._saves.poll
        if self._run.host is None:
            for group in groups:
                total = rounded_sum(group.weights) if group.apart else group.weight
                yield group, total, requested(), due(), poll() is not None
                if self._restart:
                    break
            return
        self._next = None
        for group in groups:
            hashes, weights = (
                self._checks.hashes() if self._checks is not None else [],
                self._weights(group),
            )
            mine = torch.tensor(
                [requested(), due(), poll() is not None, *weights, *hashes], dtype=torch.float64
            )
            work = dist.all_reduce(mine, group=self._run.host, async_op=True)
            before: tuple[Group, Tensor, Any] | None = self._next
            self._next, self._pending_hashes = (group, mine, work), len(hashes)
            if before is not None:
                before[2].wait()
                stop, save, failed, *sums = before[1].numpy().tolist()
                yield before[0], rounded_sum(sums[: len(weights)]), stop, save, failed
                if self._restart:
                    self._next[2].wait()
                    return

    def _weights(self, group: Group) -> list[float]:
        """Return the values to all-reduce: the total weight; with ``batch.grain``, one slot for
        each micro-batch."""
        if not group.apart:
            return [group.weight]
        mine, rank = len(group.weights), self._run.rank
        return [0.0] * (mine * rank) + group.weights + [0.0] * (mine * (self._run.ranks - rank - 1))
