"""Checks of several columns of a row together, before training."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from oneloop.tasks.rows.cache import alone, key_of, rows_content
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import sampled
from oneloop.tasks.rows.rows import FINDINGS, Row, unusable


def check_together(
    sources: Sequence[Source], keys: Sequence[str], problem: Callable[..., str]
) -> None:
    """Raise ValueError if values of several columns of a row do not fit each other.

    Rows are checked once, and again while they are read: of remote ones, only some are read before.

    Args:
        sources: the data sets.
        keys: task keys of the columns.
        problem: returns what is wrong with the values of these columns; empty if nothing is.
    """
    for source in sources:
        columns = [source.columns[key] for key in keys]
        source.checks[problem.__name__] = partial(_check, columns, problem)
        for rows in source.parts.values():
            # An empty file of the cache states that these rows are right.
            key = key_of(problem.__name__, rows_content(rows), *columns)
            with alone(f"values/{key}.ok") as done:
                if done.exists():
                    continue
                _check_rows(sampled(rows), columns, problem)
                if not FINDINGS.get():
                    done.touch()


def unlearnable(anchor: str, positive: str, *negatives: str) -> str:
    """Return why nothing can be learned from a pair of texts; empty if something can.

    Args:
        anchor: the first text.
        positive: the text that belongs to it.
        negatives: texts that do not belong to it.
    """
    if not all(map(str.strip, (anchor, positive, *negatives))):
        return "a text of the pair is empty; fill it, or remove the row"
    if positive in negatives:
        return "a hard negative is equal to the positive; write another text, or remove the row"
    return ""


def _check_rows(rows: Any, columns: Sequence[str], problem: Callable[..., str]) -> None:
    values = [values_of(rows, column) for column in columns]
    for number, row in enumerate(zip(*values, strict=True)):
        # A missing value is already known.
        if None in row:
            continue
        why = problem(*row)
        if why:
            unusable(rows.where(number), f": {why}")


def values_of(rows: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column."""
    for array in rows.values(column):
        yield from array.to_pylist()


def _check(columns: Sequence[str], problem: Callable[..., str], row: Row) -> None:
    why = problem(*(row[column] for column in columns))
    if why:
        raise ValueError(why)
