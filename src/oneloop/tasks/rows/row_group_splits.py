"""Validation and test splits of whole row groups (``task.split_by groups``): no row is read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

DRAWS = 1_000_000
"""numbers below this are drawn for rows and groups"""
_LEAST = 20  # row groups


def check_split_by(where: str, splits: Mapping[str, Any], split_by: str) -> None:
    """Raise ValueError if the missing splits cannot be drawn in this way.

    Args:
        where: the value of ``task.data``.
        splits: the rows by split; all under ``""`` if there are no splits.
        split_by: rows or groups.
    """
    if "validation" in splits:
        return
    rows = splits["train" if "train" in splits else ""]
    if split_by == "rows" and getattr(rows, "remote", False):
        raise ValueError(
            f"task.data {where!r} has no validation split, and to draw one by rows every row would "
            "be read from the network; add a validation split, or draw whole row groups "
            "(--task.split_by groups)"
        )
    if split_by == "groups" and not hasattr(rows, "select_groups"):
        raise ValueError(
            f"task.data {where!r}: task.split_by groups draws row groups of Parquet files, and "
            "these data have none; convert them to Parquet, or draw rows "
            "(--task.split_by rows)"
        )
    if split_by == "groups":
        count = len(rows.filled_groups())
        if count < _LEAST:
            raise ValueError(
                f"task.data {where!r} has {count} row groups, and task.split_by groups needs at "
                f"least {_LEAST}; write smaller groups (python -m oneloop.tasks.rows.rewrite "
                "OLD_FOLDER NEW_FOLDER --rows N), or add a validation split"
            )


def draw_groups(rows: Any, share: float) -> dict[str, NDArray[np.int64]]:
    """Return the row groups of train, validation and test: each held-out split has at least one.

    A hash of the file's name, relative to the data set's folder, and of the group's number decides.
    Equal rows may be in two splits.

    Args:
        rows: rows of Parquet files.
        share: share of the groups for each of validation and test.
    """
    # Draw a number below a million for each group.
    groups = []
    draws = []
    for group, (name, number) in rows.filled_groups().items():
        groups.append(group)
        draws.append(xxh3_64_intdigest(f"{name}\0{number}".encode()) % DRAWS)
    order = np.array(groups)[np.argsort(draws, kind="stable")]

    # The lowest numbers are the validation split, the next ones the test split.
    both = np.searchsorted(np.sort(draws), [share * DRAWS, 2 * share * DRAWS])
    end = max(1, int(both[0]))
    end_of_test = max(end + 1, int(both[1]))
    return {
        "train": order[end_of_test:],
        "validation": order[:end],
        "test": order[end:end_of_test],
    }
