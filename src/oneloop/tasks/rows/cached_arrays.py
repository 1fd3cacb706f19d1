"""Arrays of different lengths: computed once per row on all cores, cached and memory-mapped."""

import json
import math
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.basics.system.processes import die_with, usable_cores
from oneloop.basics.system.signals import on_stops
from oneloop.basics.system.start_methods import spawns, start_context
from oneloop.basics.untrusted import delete
from oneloop.tasks.rows.cache import alone, key_of, rows_content
from oneloop.tasks.rows.rows import FINDINGS, Row, Rows, unusable

Make = Callable[[Row], NDArray[np.int32]]
# array of a row, None if it is invalid; its error; and example and text of each subject of remarks
MadeRow = tuple[Any, str, Mapping[str, tuple[str, str]]]
_CHUNK = 2000  # rows per task of a worker process
WARNED = 0.1  # share of rows from which a line about them is a warning


@dataclass(frozen=True)
class Ragged:
    """Concatenated arrays of different lengths."""

    values: NDArray[np.int32]
    ends: NDArray[np.int64]  # end of each array in ``values``
    skipped: Sequence[tuple[int, str]] = ()  # index and error of each omitted row
    # of each subject of remarks, number of rows, and index and example of the first one
    remarks: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()  # log lines about the remarks
    texts: Mapping[int, str] = field(default_factory=dict)  # kept texts by the start of the array


_remarks: dict[str, tuple[str, str]] = {}  # about the row of which this process makes an array


def remark(subject: str, example: str, *, text: str = "") -> None:
    """Count the row of which an array is made, once for each subject.

    Args:
        subject: what the row has: a predicate.
        example: is logged of the first row.
        text: is kept beside the array, if it is not empty.
    """
    _remarks.setdefault(subject, (example, text))


def remark_lines(remarks: Mapping[str, Any], total: int, rows: Any) -> list[str]:
    """Return a log line for each subject of remarks.

    Args:
        remarks: of each subject, number of rows, and index and example of the first one.
        total: number of all rows.
        rows: their method ``where`` returns the position of a row.
    """
    lines = []
    for subject, (count, index, example) in remarks.items():
        begin = "warning: " if count >= WARNED * total else ""
        counted = f"{begin}{count:,} of {total:,} rows"
        lines.append(f"{counted} {subject} (first: {rows.where(index)}: {example})")
    return lines


def ragged(
    rows: Rows,
    make: Make,
    *,
    made_by: Any,
    what: str,
    skip: bool = False,
    empty: bool = False,
    chunk: int = _CHUNK,
) -> Ragged:
    """Return the arrays that ``make`` returns for each row, cached by the rows' content.

    ``oneloop check`` collects the invalid rows in its findings.

    Args:
        rows: the rows.
        make: converts a row to an array; raises ValueError if the row is invalid.
        made_by: JSON values that describe ``make``: a part of the cache key.
        what: label of the progress bar.
        skip: omit invalid rows, unless every row is invalid.
        empty: with ``skip``, omit them even then.
        chunk: rows per task of a process.

    Raises:
        ValueError: a row is invalid, with its position.
    """
    checks = FINDINGS.get() is not None
    allowed = 0  # invalid rows
    if skip or checks:
        allowed = len(rows) if empty or checks else len(rows) - 1
    with alone(f"made/{key_of(rows_content(rows), made_by)}") as path:
        made = _read(path, rows)
        if made is None:
            draft = path.with_suffix(f".{os.getpid()}.draft")
            delete(draft, inside=path.parent)
            draft.mkdir()
            try:
                _write_arrays(rows, make, draft, what, allowed=allowed, chunk=chunk)
                delete(path, inside=path.parent)
                draft.rename(path)
            finally:
                delete(draft, inside=path.parent)
            made = _read(path, rows)
    assert made is not None, path

    # Report the invalid rows, also those that an earlier call has cached.
    skipped = made.skipped
    if len(skipped) > allowed and skip:  # oneloop check has cached that every row is invalid
        raise ValueError(f"{rows.where(skipped[0][0])}: {skipped[0][1]}")
    if not skip or (checks and not empty):  # with ``empty``, the caller reports them
        for index, why in skipped:
            unusable(rows.where(index), f": {why}")
    return made


def _read(folder: Path, rows: Rows) -> Ragged | None:
    """Return the arrays of rows in a folder; None if a file is missing or too short."""
    try:
        ends = np.load(folder / "ends.npy", mmap_mode="r")
        values: NDArray[np.int32] = np.zeros(0, np.int32)
        if len(ends) and ends[-1]:  # an empty file cannot be mapped
            values = np.memmap(folder / "values.bin", np.int32, "r", shape=ends[-1])
        skipped, remarks, texts = json.loads((folder / "rows.json").read_text())
        notes = remark_lines(remarks, len(ends), rows)
        return Ragged(values, ends, skipped, remarks, notes, dict(texts))
    except (OSError, ValueError, EOFError):
        return None


def _write_arrays(
    rows: Rows, make: Make, folder: Path, what: str, *, allowed: int, chunk: int
) -> None:
    """Write values.bin, ends.npy and rows.json; stop above ``allowed`` invalid rows."""
    lengths = list[int]()
    skipped = list[tuple[int, str]]()
    remarks = dict[str, Any]()
    texts = list[tuple[int, str]]()
    chunks = math.ceil(len(rows) / chunk)
    with (folder / "values.bin").open("wb") as file, Working(what, total=chunks) as bar:
        for index, (array, why, of_row) in enumerate(in_order(rows, make, chunk)):
            if index % chunk == 0:
                bar.advance()
            if array is None:
                skipped.append((index, why))
                if len(skipped) > allowed:
                    raise ValueError(f"{rows.where(skipped[0][0])}: {skipped[0][1]}")
                continue
            for subject, (example, text) in of_row.items():
                remarks.setdefault(subject, [0, index, example])[0] += 1
                if text:
                    texts.append((file.tell() // array.itemsize, text))
            lengths.append(len(array))
            file.write(array.tobytes())  # np.tofile would not say that the disk is full
    (folder / "rows.json").write_text(json.dumps([skipped, remarks, texts]))
    content = BytesIO()
    np.save(content, np.cumsum(lengths, dtype=np.int64))
    (folder / "ends.npy").write_bytes(content.getvalue())


def in_order(rows: Any, make: Callable[[Any], Any], chunk: int) -> Iterator[MadeRow]:
    """Yield the result of ``make`` for each row, computed on all cores.

    Args:
        rows: a sequence of rows.
        make: converts a row; a ValueError marks the row as invalid.
        chunk: rows per task of a process.
    """
    cores = min(usable_cores(), math.ceil(len(rows) / chunk))
    make_index = partial(make_row, rows, make)
    indices = range(len(rows))
    # A daemon may not start processes.
    if cores < 2 or multiprocessing.current_process().daemon or not _can_send(make_index):
        yield from map(make_index, indices)
        return

    pool = ProcessPoolExecutor(
        cores,
        start_context(alone=True),
        initializer=_begin_worker,
        initargs=(os.getpid(), make_index),
    )
    with pool:
        try:
            yield from pool.map(_make_here, indices, chunksize=chunk)
        finally:
            pool.shutdown(cancel_futures=True)


def _can_send(make_index: Callable[[int], MadeRow]) -> bool:
    """Return whether the processes of a pool get the function with its rows."""
    if not spawns():
        return True
    try:
        # The processes do not import a script that is running, which may have no guard.
        return b"__main__" not in pickle.dumps(make_index)
    except (AttributeError, TypeError, pickle.PicklingError):
        return False


_given: list[Callable[[int], MadeRow]] = []  # in a process of the pool: its function


def _begin_worker(parent: int, make_index: Callable[[int], MadeRow]) -> None:
    """Ignore stop signals and end with the parent, which decides whether to stop."""
    on_stops(signal.SIG_IGN)
    die_with(parent)
    _given[:] = [make_index]


def _make_here(index: int) -> MadeRow:
    """:func:`make_row` with the rows and the function of this process."""
    return _given[0](index)


def make_row(rows: Any, make: Callable[[Any], Any], index: int) -> MadeRow:
    """Return the array of a row, None if it is invalid; the error; and remarks about the row."""
    row = rows[index]
    _remarks.clear()
    try:
        return make(row), "", dict(_remarks)
    except ValueError as error:
        return None, str(error), {}
