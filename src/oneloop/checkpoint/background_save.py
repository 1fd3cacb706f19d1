"""Saves in the background: the writing process of one rank, and the save in progress."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from oneloop.basics.heartbeats import BEATS, SAVING
from oneloop.basics.progress import Working
from oneloop.basics.untrusted import NotDeleted
from oneloop.checkpoint.pieces import Piece
from oneloop.checkpoint.ranks import Ranks
from oneloop.checkpoint.save_request import Answer, SaveRequest
from oneloop.checkpoint.store import Store
from oneloop.checkpoint.writing_process import TORN, WritingProcess

WRITER = "oneloop.checkpoint.writer"  # module of the writing process
MOST_FAILURES = 3  # consecutive failed saves that do not end the run
_MIN_LIMIT = 10.0  # seconds; minimum of the time limit of a save
# bytes per second; assumed minimum throughput of storage (a tenth of it for a bucket)
_MIN_THROUGHPUT = 10e6
_MIN_UPLOAD = 120.0  # seconds; minimum of the time limit of a save to a bucket
# seconds between two starts of a writing process that is killed between saves
_RESTART = 5.0
_TICK = 1.0  # seconds between two heartbeats while training waits for a save
_STILL = "still"  # in place of an error: the save is still in progress
_TAKEN = "Taken: "  # beginning of an error: another process owns the mirror
_LEFT = "NotDeleted: "  # beginning of an error: earlier checkpoints could not be deleted


class SaveError(OSError):
    """Too many saves have failed, or one takes too long."""


class FailedElsewhere(SaveError):
    """The same, on a rank that is not the cause."""


class BackgroundSaves:
    """The saves of one rank.

    Args:
        store: the checkpoints folder.
        ranks: of the run. On a GPU, the shared memory is pinned.
        patience: factor of the time limit of a save; 0: no limit.
        say: reports failed saves, and memory that cannot be pinned.
    """

    def __init__(
        self, store: Store, ranks: Ranks, *, patience: float, say: Callable[[str], None]
    ) -> None:
        self.store = store
        self.ranks = ranks
        self._patience = patience
        self.say = say if ranks.is_main else _ignore

        # The process.
        self._process: WritingProcess | None = None
        # arguments of Uploads, if there is a mirror
        self.uploads: dict[str, Any] | None = None
        # Whether copies from a GPU overlap with training. Then forward and backward must not change
        # parameters, and whatever else changes them calls before_change().
        self.overlaps = False
        # Returns these parameters; saves notice if one changes nevertheless.
        self.watched: Callable[[], Sequence[torch.Tensor]] = tuple
        # Returns the bytes of a save, or 0 if they are not known yet: if it is set, the memory of
        # saves is made in the background.
        self.ahead: Callable[[], int] | None = None
        self._mirror_failed = False  # as last reported
        self._warned = False  # that its memory is not pinned

        # The save.
        self._pending = False  # it has no answer yet
        self._error: str | None = None  # of this rank
        self._step = 0
        self._size = 0  # bytes of tensor data
        self._began = 0.0  # time.monotonic()
        self._shown: Working | None = None
        self.stuck = False  # whether the save exceeds the time limit on any rank

        # Earlier saves.
        self._slowest = 0.0  # seconds of the slowest save so far
        self._failures = 0  # in a row

    def begin(self, request: SaveRequest, pieces: list[Piece]) -> None:
        """Begin to copy to host memory; after it, the writing process writes.

        Args:
            request: what to write.
            pieces: the tensors.
        """
        self._step = request.step

        # Let the shared memory have this size.
        process = self.start()
        process.grow(max(1, request.size))
        if process.unpinned and not self._warned:
            self._warned = True
            report = self.say if self.ranks.is_main else print
            report(
                f"the memory of saves cannot be pinned on rank {self.ranks.rank} "
                f"({process.unpinned}), so each save copies it more slowly; let this process lock "
                "more memory (ulimit -l), or leave more memory free"
            )
        process.write(asdict(request), pieces, self._overlapping(process), self.watched())
        self._pending = True
        self._began = time.monotonic()
        self._size = request.size
        self._shown = Working(f"saving step {request.step}")

    def _overlapping(self, process: WritingProcess) -> torch.device | None:
        """Return the device of a copy that overlaps with training; None: training waits for it."""
        device = self.ranks.device
        overlaps = self.overlaps and device.type == "cuda" and not process.unpinned
        return device if overlaps else None

    def _hand_over(self, *, wait: bool) -> None:
        """:meth:`WritingProcess.hand_over`; the time limit of the save begins then."""
        if self._process is not None and self._process.hand_over(wait=wait):
            self._began = time.monotonic()

    def start(self) -> WritingProcess:
        """Return the writing process; start it if it does not run."""
        if self._process is not None and not self._process.alive():
            self._process.close()
            self._process = None
        if self._process is None:
            self._process = WritingProcess(
                WRITER, device=self.ranks.device, uploads=self.uploads, heard=self._heard
            )
        return self._process

    def _heard(self, news: Answer) -> None:
        """Receive news of the uploads; report when they begin to fail, and when they work again."""
        if news.error and news.error.startswith(_TAKEN):
            self._error = news.error
        elif news.error and not self._mirror_failed:
            self.say(
                f"MIRROR FAILED; a later save tries again: {news.error} (the run folder is intact)"
            )
        elif self._mirror_failed and not news.error:
            self.say(f"the mirror works again, and holds step {news.mirrored}")
        self._mirror_failed = bool(news.error)

    def end_uploads(self, *, final: bool) -> Answer:
        """Upload what the mirror lacks, and wait for it; cancel a save that waits for other ranks.

        Args:
            final: also upload the final weights.

        Returns:
            The newest step in the mirror, and the error.
        """
        self._hand_over(wait=True)
        process = self.start()
        process.send({"end": {"final": final}})
        answer: Answer | None = None
        while answer is None or answer.step is not None:  # of a save that was in progress
            answer = process.answer(1.0)
            BEATS.beat()
        return answer

    def poll(self) -> str | None:
        """Return this rank's error of the save in progress if it is known by now.

        Does not block: less than 0.1 us between two saves, 6 to 8 us during a save or with a
        mirror.

        If the writing process of a mirror was killed between two saves, start another one, which
        renews the lease. Otherwise, another machine could take the mirror before the next save.
        """
        if self.ahead is not None and not self._pending:  # a save in progress uses this memory
            size = self.ahead()
            if size:
                self.start().grow_ahead(size)
                self.ahead = None
        process = self._process
        if process is not None and (self._pending or self.uploads is not None):
            self._hand_over(wait=False)
            answer = process.answer(0.0)
            if self._pending:
                self._record(answer)
            elif answer is not None and time.monotonic() - process.began > _RESTART:
                self.start()
        return self._error

    def finish(self, *, or_go_on: bool = False) -> str | None:
        """Wait for the save in progress. Collective: call on every rank.

        Args:
            or_go_on: leave a slow save running and set ``stuck``.

        Returns:
            The error, the same on all ranks; None if the checkpoint is complete, or no save was in
            progress.

        Raises:
            SaveError: on all ranks, after more than three failures in a row, if the save takes
                too long, or if another process owns the mirror. It is FailedElsewhere on the ranks
                that are not the cause.
        """
        if not self._pending and self._error is None and self.ranks.count == 1:
            self.stuck = False
            return None
        with BEATS.phase(SAVING):
            self._hand_over(wait=True)
            errors = self._collect_errors(or_go_on=or_go_on)
        still = [rank for rank, problem in enumerate(errors) if problem == _STILL]
        failed = [rank for rank, problem in enumerate(errors) if _is_error(problem)]
        self.stuck = bool(still)

        # The save takes too long, and no rank has failed.
        if still and not failed:
            # Rank 0 may only wait for the others.
            slow = [rank for rank in still if rank > 0] or still
            words = (
                f"the save of step {self._step} did not finish within "
                f"{time.monotonic() - self._began:.0f} s (rank {', '.join(map(str, slow))}): its "
                "storage does not respond"
            )
            if or_go_on:
                self.say(f"{words}; continuing without a new checkpoint")
                return None
            self._end_process()
            raise self._error_of(slow, words)

        # The save has ended on all ranks.
        if self._pending:
            self._end_process()  # another rank failed, so this rank's shard is useless
        self._error = None
        self._pending = False
        self.stuck = False
        if not failed:
            self._failures = 0
            return None

        # Report the cause: ranks that waited for a failed rank report Gone.
        failed.sort(key=lambda rank: str(errors[rank]).startswith("Gone"))
        return self._failed(str(errors[failed[0]]), failed[0])

    def _error_of(self, causes: list[int], words: str) -> SaveError:
        """Return the error of a save; the supervisors report that of a rank that caused it."""
        return SaveError(words) if self.ranks.rank in causes else FailedElsewhere(words)

    def _collect_errors(self, *, or_go_on: bool) -> list[str | None]:
        """Return the error of every rank. Collective."""
        # Rank 0 waits last, because it completes the checkpoint.
        if not self.ranks.is_main:
            self._wait(or_go_on=or_go_on)
        _, *others = self.ranks.gather(self._state())
        failed = any(map(_is_error, others))
        if self.ranks.is_main and self._pending and self._process is not None:
            if failed:
                self._process.send(None)
            if _STILL not in others:
                self._process.wrote = time.monotonic()  # it has waited for the others
                self._wait(or_go_on=or_go_on)
        if self.ranks.is_main and (self._error or failed):
            # No writer is active, and none starts before all ranks know the result. What cannot be
            # deleted now is harmless: the next start deletes it, or reports it.
            with suppress(NotDeleted):
                self.store.sweep(".draft")
        return self.ranks.gather(self._state())

    def _state(self) -> str | None:
        return self._error or (_STILL if self._pending else None)

    def _failed(self, problem: str, rank: int) -> str | None:
        """Report a failed save of a rank, and return its error. Raises SaveError after too many."""
        # The checkpoint is complete, but earlier ones remain, which the next save tries to delete.
        if problem.startswith(_LEFT):
            self.say(f"the checkpoint is saved, but {problem.removeprefix(_LEFT)}")
            return None
        if problem != TORN:  # training continues with copies that it waits for
            self._failures += 1
        if problem.startswith(_TAKEN):
            raise self._error_of([rank], problem.removeprefix(_TAKEN))
        if self._failures > MOST_FAILURES:
            words = f"{self._failures} saves in a row have failed, the last one: {problem}"
            raise self._error_of([rank], words)
        self.say(
            f"SAVE FAILED; the next save tries again: {problem} (the previous checkpoint is intact)"
        )
        return problem

    def _wait(self, *, or_go_on: bool) -> None:
        """Wait for the writing process, at most until the time limit of the save.

        Unless the run can continue meanwhile, the limit counts from the last bytes written.
        """
        if not self._pending or self._process is None:
            return
        least = _MIN_LIMIT
        rate = _MIN_THROUGHPUT
        if self.uploads is not None and self.uploads["counts"]:
            # a save to a bucket, which has its own limit
            least = _MIN_UPLOAD
            rate /= 10
        limit = self._patience * max(least, 3 * self._slowest, self._size / rate)
        answer = self._process.answer(0.0)
        while answer is None:
            since = self._began if or_go_on else max(self._began, self._process.wrote)
            left = since + (limit or math.inf) - time.monotonic()
            if left <= 0:
                return
            answer = self._process.answer(min(left, _TICK))
            BEATS.beat()  # this wait has its own limit
        self._record(answer)

    def _record(self, answer: Answer | None) -> None:
        """Note the end of the save, if there is an answer."""
        if answer is not None:
            self._pending = False
            self.overlaps &= answer.error != TORN
            if self._shown is not None:
                self._shown.done()
            self._error = answer.error
            self._slowest = max(self._slowest, time.monotonic() - self._began)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        """End the writing process, after its uploads (:meth:`end_uploads`)."""
        if self._process is not None:
            self._process.close()
            why = self._process.dropped
            if self._pending and why:
                self.say(f"SAVE FAILED: {why} (the previous checkpoint is intact)")
            self._process = None


def _is_error(problem: str | None) -> bool:
    return problem not in (None, _STILL)


def _ignore(line: str) -> None:
    """Report nothing: rank 0 does."""
