"""Checks of several columns of a row together, before training."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from oneloop.tasks.rows.cache import alone, key_of, rows_content
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import is_remote, lenient, sampled
from oneloop.tasks.rows.rows import FINDINGS, Row, unusable

_CACHE_VERSION = 3  # increase it if a check changes


def check_as_long(sources: Sequence[Source], one: str, other: str) -> None:
    """Raise ValueError if the lists of two columns (by task key) differ in length in a row."""
    for source in sources:
        _check_once(source, [source.columns[one], source.columns[other]], _check_lengths)


def check_pairs(sources: Sequence[Source], keys: Sequence[str]) -> None:
    """Raise ValueError if a text of a pair is empty, or a hard negative equals its positive.

    Remote rows are also checked while they are read.

    Args:
        sources: the data sets.
        keys: task keys of the columns: anchor, positive, and those of hard negatives.
    """
    for source in sources:
        columns = [source.columns[key] for key in keys]
        _check_once(source, columns, _check_each_pair)
        if any(map(is_remote, source.parts.values())):
            source.checks["the pair"] = partial(_check_pair, columns)


def _check_each_pair(rows: Any, columns: Sequence[str]) -> None:
    before = 0
    for arrays in zip(*map(rows.values, columns), strict=True):
        texts = zip(*(array.to_pylist() for array in arrays), strict=True)
        for number, values in enumerate(texts, start=before):
            try:
                _check_pair(columns, dict(zip(columns, values, strict=True)))
            except ValueError as error:
                unusable(rows.where(number), f": {error}")
        before += len(arrays[0])


def _check_pair(columns: Sequence[str], row: Row) -> None:
    """Raise ValueError if nothing can be learned from a pair; missing texts are already known."""
    for column in columns:
        if row[column] is not None and not row[column].strip():
            raise ValueError(f"the text in {column!r} is empty; fill it, or remove the row")
    for column in columns[2:]:
        if row[column] is not None and row[column] == row[columns[1]]:
            raise ValueError(
                f"the hard negative in {column!r} is equal to the positive, so the loss cannot "
                "tell them apart; write another text, or remove the row"
            )


def _check_once(
    source: Source, columns: Sequence[str], check: Callable[[Any, Sequence[str]], None]
) -> None:
    """Check the rows of a source, unless the cache states that these rows are right.

    Args:
        source: the data set.
        columns: names of columns.
        check: of rows and these columns; reports each wrong row.
    """
    for rows in source.parts.values():
        key = key_of(_CACHE_VERSION, rows_content(rows), *columns, check.__name__)
        with alone(f"values/{key}.ok") as done:
            with lenient(rows, skip=source.skipped is not None):
                if not done.exists():
                    check(sampled(rows), columns)
            if not FINDINGS.get():
                done.touch()


def _check_lengths(rows: Any, columns: Sequence[str]) -> None:
    """Report each row whose lists in two columns differ in length."""
    from pyarrow import compute

    first, second = columns
    before = 0
    for some, others in zip(rows.values(first), rows.values(second), strict=False):
        length = compute.list_value_length(some).to_numpy(zero_copy_only=False)
        other_length = compute.list_value_length(others).to_numpy(zero_copy_only=False)
        for wrong in np.flatnonzero(length != other_length).tolist():
            counts = f"{int(length[wrong])} {first} and {int(other_length[wrong])} {second}"
            unusable(rows.where(before + wrong), f": {counts}; each needs one of the other")
        before += len(some)
