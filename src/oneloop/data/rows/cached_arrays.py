"""Arrays of different lengths, made of rows once, on all cores, and memory-mapped from the cache."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.launcher import die_with, on_stops
from oneloop.basics.progress import tracked
from oneloop.data.rows.cache import alone, key_of
from oneloop.data.rows.rows import Row, Rows

Make = Callable[[Row], NDArray[np.int32]]
Made = tuple[list[Any], list[tuple[int, str]]]  # arrays of a shard's rows; rows that nothing can be made of, and why
_SHARD = 2000  # rows that a process takes at once


@dataclass(frozen=True)
class Ragged:
    """Arrays one after another."""

    values: NDArray[np.int32]
    ends: NDArray[np.int64]  # where each array ends
    skipped: Sequence[tuple[int, str]] = ()  # rows that were left out, by index, and why


def ragged(rows: Rows, make: Make, *, made_by: Any, what: str, skip: bool = False) -> Ragged:
    """Return the arrays that ``make`` returns for each row, cached by the rows' content and ``made_by`` (JSON).
    ``what`` names the progress bar. If ``make`` raises ValueError, the row is named in a ValueError, or omitted
    (``skip``, unless all are)."""
    with alone(f"made/{key_of(rows.fingerprint(), made_by, *['skip'] * skip)}") as place:
        if not (place / "ends.npy").exists():
            draft = place.with_suffix(f".{os.getpid()}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                _made(rows, make, draft, what, skip=skip)
                shutil.rmtree(place, ignore_errors=True)
                draft.rename(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    ends: NDArray[np.int64] = np.load(place / "ends.npy", mmap_mode="r")
    values = np.memmap(place / "values.bin", np.int32, "r") if len(ends) and ends[-1] else np.zeros(0, np.int32)
    return Ragged(values, ends, json.loads((place / "skipped.json").read_text()) if skip else ())


def _made(rows: Rows, make: Make, folder: Path, what: str, *, skip: bool) -> None:
    shards = [range(start, min(start + _SHARD, len(rows))) for start in range(0, len(rows), _SHARD)]
    lengths, skipped = list[int](), list[tuple[int, str]]()
    with (folder / "values.bin").open("wb") as file:
        for arrays, wrong in tracked(_in_order(rows, make, shards), what, total=len(shards)):
            skipped += wrong
            if skipped and (not skip or len(skipped) == len(rows)):
                raise ValueError(f"{rows.where(skipped[0][0])}: {skipped[0][1]}")
            lengths += [len(array) for array in arrays]
            if arrays:
                np.concatenate(arrays).tofile(file)
    (folder / "skipped.json").write_text(json.dumps(skipped))
    np.save(folder / "ends.npy", np.cumsum(lengths, dtype=np.int64))


def _in_order(rows: Rows, make: Make, shards: list[range]) -> Iterator[Made]:
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


_work: list[Any] = []  # rows and function, for the processes that are forked: neither need be picklable


def _begin(parent: int) -> None:
    """A forked process has this one's signal handlers, which only note; whether to stop is this one's to decide."""
    on_stops(signal.SIG_IGN)
    die_with(parent)


def _of_shard(shard: range) -> Made:
    """What is made of these rows, and what is wrong with the others."""
    rows, make = _work
    made, wrong = [], []
    for index in shard:
        row = rows[index]
        try:
            made.append(make(row))
        except ValueError as error:
            wrong.append((index, str(error)))
    return made, wrong
