"""Arrays of different lengths, made of rows once, on all cores, and memory-mapped from the cache."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.orphans import die_with
from oneloop.basics.progress import tracked
from oneloop.basics.stop_signals import on_stops
from oneloop.data.rows.cache import alone, key_of
from oneloop.data.rows.rows import Row, Rows

_SHARD = 2000
"""rows that a process takes at once"""


@dataclass(frozen=True)
class Ragged:
    """Arrays one after another."""

    values: NDArray[np.int32]
    ends: NDArray[np.int64]
    """where each array ends"""


def ragged(rows: Rows, make: Callable[[Row], NDArray[np.int32]], *, made_by: Any, what: str) -> Ragged:
    """What a function makes of each row, kept by the rows' content and ``made_by``.

    Args:
        rows: where from.
        make: an array of a row.
        made_by: tells this function from others, as JSON.
        what: is under way, for a bar.

    Raises:
        ValueError: a row that nothing can be made of, with its place.
    """
    with alone(f"made/{key_of(rows.fingerprint(), made_by)}") as place:
        if not (place / "ends.npy").exists():
            draft = place.with_suffix(f".{os.getpid()}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                _made(rows, make, draft, what)
                shutil.rmtree(place, ignore_errors=True)
                draft.rename(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    ends: NDArray[np.int64] = np.load(place / "ends.npy", mmap_mode="r")
    values = np.memmap(place / "values.bin", np.int32, "r") if len(ends) and ends[-1] else np.zeros(0, np.int32)
    return Ragged(values, ends)


def _made(rows: Rows, make: Callable[[Row], NDArray[np.int32]], folder: Path, what: str) -> None:
    shards = [range(start, min(start + _SHARD, len(rows))) for start in range(0, len(rows), _SHARD)]
    lengths = []
    with (folder / "values.bin").open("wb") as file:
        for arrays in tracked(_in_order(rows, make, shards), what, total=len(shards)):
            lengths += [len(array) for array in arrays]
            np.concatenate(arrays).tofile(file)
    np.save(folder / "ends.npy", np.cumsum(lengths, dtype=np.int64))


def _in_order(rows: Rows, make: Callable[[Row], NDArray[np.int32]], shards: list[range]) -> Iterator[list[Any]]:
    _work[:] = [rows, make]
    cores = min(len(os.sched_getaffinity(0)), len(shards))
    try:
        if cores == 1 or multiprocessing.current_process().daemon:
            yield from map(_of_shard, shards)
            return
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(cores, context, initializer=_begin, initargs=(os.getpid(),)) as pool:
            try:
                yield from pool.map(_of_shard, shards)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        _work.clear()


_work: list[Any] = []
"""rows and function, for the processes that are forked: neither need be picklable"""


def _begin(parent: int) -> None:
    """A forked process has this one's signal handlers, which only note; whether to stop is this one's to decide."""
    on_stops(signal.SIG_IGN)
    die_with(parent)


def _of_shard(shard: range) -> list[Any]:
    rows, make = _work
    made = []
    for index in shard:
        row = rows[index]
        try:
            made.append(make(row))
        except ValueError as error:
            raise ValueError(f"{rows.where(index)}: {error}") from error
    return made
