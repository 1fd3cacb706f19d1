"""Checks of remote rows: of some rows before a run, and of each row while it is read.

A disk is read completely before a run. To do so over a network would be a download of everything.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

import numpy as np

from oneloop.tasks.rows.rows import Row

Rule = Literal["values", "labels", "numbers"]
"""what the values of a column must be"""
_ROWS = 1000  # rows that are checked before a run, about
_BYTES = 64 << 20  # as stored, of the row groups that these rows are in
_LARGEST = float(np.finfo(np.float32).max)
_LABEL_BYTES = 32 << 20  # as stored, of a column of labels that is read completely


def is_remote(rows: Any) -> bool:
    """Return whether rows are read over a network."""
    return bool(getattr(rows, "remote", False))


def sampled(rows: Any) -> Any:
    """Return some remote rows, from row groups that are evenly spread; or all rows of a disk."""
    if not is_remote(rows):
        return rows
    groups = np.flatnonzero(rows.sizes)
    by_rows = _ROWS // max(1, int(rows.sizes[groups].mean()))
    by_bytes = _BYTES // max(1, int(rows.stored_bytes().max()))
    number = max(1, min(len(groups), by_rows, by_bytes))
    chosen = groups[np.linspace(0, len(groups) - 1, number).astype(np.int64)]

    # Take the first rows of each group, which is read as a whole.
    each = math.ceil(_ROWS / number)
    firsts = np.cumsum(rows.sizes) - rows.sizes
    indices = []
    for group in chosen.tolist():
        indices.append(firsts[group] + np.arange(min(each, rows.sizes[group])))
    return rows.select(np.concatenate(indices))


def sample_notes(parts: Collection[Any]) -> Iterator[str]:
    """Yield the line for the log about the remote rows of a source that were checked.

    Args:
        parts: the rows of its splits.
    """
    remote = [rows for rows in parts if is_remote(rows)]
    total = sum(map(len, remote))
    checked = sum(len(sampled(rows)) for rows in remote)
    if checked < total:
        yield (
            f"of {total:,} rows, {checked:,} were checked; the others are checked while they are "
            "read"
        )


def reject_large_labels(rows: Any, column: str) -> None:
    """Raise ValueError if all labels of remote rows are too many bytes to read before a run."""
    size = int(rows.stored_bytes([column]).sum())
    if size > _LABEL_BYTES:
        raise ValueError(
            f"{rows.where(0)}: the classes are the values of {column!r}, whose {size / 1e6:,.0f} "
            f"MB would have to be read before the run (at most {_LABEL_BYTES / 1e6:,.0f} MB); "
            "store the names of the classes in the schema (ClassLabel of datasets), or copy the "
            "data to a disk"
        )


def check_value(column: str, kind: Any, rule: Rule, row: Row) -> str:
    """Return why a row of a data set lacks a value, or has one that cannot be used; else empty.

    Args:
        column: name of the column.
        kind: type of its values, or of the elements of its lists.
        rule: ``values`` must exist; ``labels`` must not be empty texts; ``numbers`` must be finite,
            or texts of finite numbers.
        row: the row.
    """
    value = row[column]
    values = value if isinstance(value, list) else [value]
    names = getattr(kind, "names", None)
    for one in values or [None]:
        missing = one is None or (rule == "labels" and one == "")
        is_ignored = one == -100 and isinstance(value, list)
        if missing or (names and not is_ignored and not 0 <= one < len(names)):
            return f" has no value in {column!r}; fill it, or remove the row"
        if rule == "numbers" and not is_finite(one):
            return f": {one!r} in {column!r} is not a finite number in float32"
    return ""


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number in float32, or the text of one."""
    try:
        return abs(float(value)) <= _LARGEST
    except (ValueError, OverflowError):
        return False
