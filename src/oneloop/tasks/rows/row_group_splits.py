"""Validation and test splits of whole row groups (``task.split_by groups``): no row is read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from oneloop.tasks.rows.rows import DRAWS, Rows, drop_rows

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


def divided_by_groups(
    splits: Mapping[str, Any], share: float, unusable: Mapping[str, NDArray[np.int64]]
) -> dict[str, Rows]:
    """Return train, validation and test rows; take missing ones as whole groups from training.

    A hash of the file's name, relative to the data set's folder, and of the group's number decides.
    Equal rows may be in two splits.

    Args:
        splits: rows of Parquet files by split, without validation; all under ``""`` if there are
            no splits.
        share: share of the groups for each of validation and test. If only a test split exists,
            validation gets both shares.
        unusable: ascending indices of the rows to leave out, by split.

    Raises:
        ValueError: a split has no row.
    """
    training = "train" if "train" in splits else ""
    rows: Any = drop_rows(splits[training], unusable.get(training, ()))

    # Draw a number below a million for each group.
    groups = []
    draws = []
    for group, (name, number) in splits[training].filled_groups().items():
        groups.append(group)
        draws.append(xxh3_64_intdigest(f"{name}\0{number}".encode()) % DRAWS)
    order = np.array(groups)[np.argsort(draws, kind="stable")]

    # The lowest numbers are the validation split, the next ones the test split.
    both = np.searchsorted(np.sort(draws), [share * DRAWS, 2 * share * DRAWS])
    end = max(1, int(both[0]))
    end_of_test = max(end + 1, int(both[1]))
    drawn = {"train": order[end_of_test:], "validation": order[:end]}
    if "test" in splits:
        drawn["validation"] = order[:end_of_test]
    else:
        drawn["test"] = order[end:end_of_test]

    made = {split: rows.select_groups(np.sort(chosen)) for split, chosen in drawn.items()}
    if "test" in splits:
        made["test"] = drop_rows(splits["test"], unusable.get("test", ()))
    for split, kept in made.items():
        if not len(kept):
            raise ValueError(
                f"{splits[training].where(0)}: task.held_out {share} of {len(order)} row groups "
                f"give no row to {split}; set another share, or write smaller groups"
            )
    return made
