"""Checks of several columns of a row together, before training."""

from collections.abc import Callable, Sequence
from functools import partial

from oneloop.tasks.columns import checked_rows
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.rows import Row


def check_together(
    sources: Sequence[Source], keys: Sequence[str], problem: Callable[..., str]
) -> None:
    """Raise ValueError if values of several columns of a row do not fit each other.

    Rows are checked once. Of remote ones, some are checked before, and each while it is read.

    Args:
        sources: the data sets.
        keys: task keys of the columns.
        problem: returns what is wrong with the values of these columns; empty if nothing is.
    """
    for source in sources:
        columns = [source.columns[key] for key in keys]
        check = partial(_check, columns, problem)
        for rows in source.parts.values():
            checked_rows(source, rows, columns, problem.__name__, check)


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


def _check(columns: Sequence[str], problem: Callable[..., str], row: Row) -> str:
    """Return what is wrong with the values of these columns."""
    values = [row[column] for column in columns]
    # A missing value is already known.
    why = "" if None in values else problem(*values)
    return why and f": {why}"
