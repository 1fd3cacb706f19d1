"""Rows of a data set, the samples made from them, and the validation and test splits."""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from oneloop.basics.progress import tracked
from oneloop.data.skipped_rows import SkipSample
from oneloop.tasks.rows.cache import cached_json, key_of, rows_content
from oneloop.tasks.rows.csv_json_lines import NOT_UNICODE, about_one_object
from oneloop.tasks.rows.row_group_splits import DRAWS, draw_groups

Row = dict[str, Any]
Check = Callable[[Row], str]
"""returns why a row cannot be used, as :func:`unusable` takes it; empty if it can"""


@dataclass
class Findings:
    """The result of ``oneloop check``."""

    rows: int = 0
    unit: str = "rows"  # what ``rows`` counts: rows, or samples that a task makes of them
    left_out: int = 0  # rows that cannot be read, which ``rows`` does not count
    values: bool = True  # whether the values of the rows were checked
    unusable: list[tuple[str, str]] = field(default_factory=list)  # position and reason of each row
    converted: Counter[str] = field(default_factory=Counter)  # number of converted images, by kind
    empty: list[str] = field(default_factory=list)  # class folders without images


FINDINGS: ContextVar[Findings | None] = ContextVar("FINDINGS", default=None)
"""where :func:`unusable` collects rows; None: it raises"""


def unusable(where: str, why: str) -> None:
    """Raise ValueError about a row; during ``oneloop check`` add it to the findings.

    Args:
        where: file and number of the row.
        why: what is wrong; follows ``where`` in the message.
    """
    findings = FINDINGS.get()
    if findings is None:
        raise ValueError(f"{where}{why}")
    findings.unusable.append((where, why.removeprefix(":").strip()))


class Rows(Protocol):
    """Rows of a table, as ``{column: value}``; images and sounds as stored, by bytes or path."""

    @property
    def types(self) -> Mapping[str, Any]:
        """Return the columns' types: features of ``datasets`` by name."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """Return file and number of a row for messages."""

    def fingerprint(self) -> dict[str, Any]:
        """Return a description of the rows by content, independent of path and time."""

    def values(self, column: str) -> Iterator[Any]:
        """Yield a column as Arrow arrays, in row order."""

    def select(self, indices: NDArray[np.int64]) -> "Rows":
        """Return the rows at these ascending indices."""


class Unreadable(ValueError):
    """A row that cannot be read, which ``task.unreadable skip`` leaves out."""


class Mapped:
    """The samples that ``make`` returns for each row, in order.

    If ``make`` raises, a ValueError names the row's file and number. Other members are those of the
    rows, such as their order.

    Args:
        rows: the rows.
        make: converts a row to a sample.
        skip: raise SkipSample if a row cannot be read, so that a run leaves it out.
        checks: of each row, before its sample is made.
    """

    def __init__(
        self,
        rows: Any,
        make: Callable[[Any], Any],
        *,
        skip: bool = False,
        checks: Sequence[Check] = (),
    ) -> None:
        self.rows = rows
        self.make = make
        self.checks = checks
        self.skip = skip
        self.skips = skip or getattr(rows, "skips", False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        try:
            row = self.rows[index]
        except UnicodeDecodeError as error:
            raise self._wrong(index, Unreadable(f"a text {NOT_UNICODE}")) from error
        try:
            for why in filter(None, (check(row) for check in self.checks)):
                raise ValueError(why.lstrip(": "))
            return self.make(row)
        except Exception as error:
            raise self._wrong(index, error) from error

    def _wrong(self, index: int, error: Exception) -> ValueError:
        """Return the error about a row."""
        leaves_out = self.skip and isinstance(error, Unreadable)
        kind = SkipSample if leaves_out else ValueError
        return kind(f"{self.where(index)}: {error}")

    def where(self, index: int) -> str:
        """Return file and number of a row for messages."""
        where: str = getattr(self.rows, "where", "row {}".format)(index)
        return where

    def near(self, index: int) -> range:
        """Return the rows that are cheap to read after this one: those of its row group, or all."""
        if not hasattr(self.rows, "near"):
            return range(len(self))
        near: range = self.rows.near(index)
        return near

    def __getattr__(self, name: str) -> Any:
        # Only a member that is missing here is looked up; a copy has no rows yet.
        if name.startswith("_") or name == "rows":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.rows, name)


_DRAW_VERSION = 2  # increase it if other rows are drawn from the same content
_NO_ROWS = np.zeros(0, dtype=np.int64)


def divided(
    splits: Mapping[str, Rows],
    share: float,
    unusable: Mapping[str, NDArray[np.int64]] | None = None,
    *,
    by_groups: bool = False,
    label: str = "",
    text: str = "",
    notes: list[str] | None = None,
) -> dict[str, Rows]:
    """Return train, validation and test rows; take the missing splits from the training rows.

    Existing splits stay. Rows of equal content are in the same split, unless whole row groups are
    drawn. If there is a validation split, a missing test split stays missing.

    Args:
        splits: the rows by split; all under ``""`` if there are no splits.
        share: share of the training rows for each of validation and test. If only a test split
            exists, validation gets both shares.
        unusable: ascending indices of the rows to leave out, by split.
        by_groups: draw whole row groups of Parquet files.
        label: column of the class: rows of a class without training rows stay in train.
        text: column whose values are counted that are in train and in another drawn split.
        notes: gets lines about these rows, and about rows that repeat.

    Raises:
        ValueError: there are too few rows.
    """
    left_out = unusable or {}
    for split, indices in left_out.items():
        if len(indices) and len(indices) == len(splits[split]):
            raise ValueError(
                f"{splits[split].where(0)}: no row of the {split or 'whole'} set can be used"
            )
    usable = {split: drop_rows(rows, left_out.get(split, ())) for split, rows in splits.items()}
    if "validation" in splits:
        return usable

    training = "train" if "train" in splits else ""
    rows = splits[training]
    if len(rows) < 3:
        where = rows.where(0) if len(rows) else "the data"
        about = about_one_object(rows[0]) if len(rows) == 1 else ""
        raise ValueError(f"{where}: {len(rows)} rows are too few for three splits{about}")

    # Draw from all rows, so that the splits do not depend on which rows are left out.
    if by_groups:
        drawn = draw_groups(rows, share)
        select = usable[training].select_groups
    else:
        key = key_of(_DRAW_VERSION, rows_content(rows), share, label, text)
        held_out = cached_json(
            f"held-out/{key}.json", lambda: _draw_splits(rows, share, label, text)
        )
        lines = held_out.pop("notes")
        if notes is not None:
            notes += lines
        drawn = {split: np.array(indices, np.int64) for split, indices in held_out.items()}
        train = np.delete(np.arange(len(rows)), np.concatenate([*drawn.values()]))
        drawn = {"train": train, **drawn}

        def select(indices: NDArray[np.int64]) -> Rows:
            return rows.select(np.setdiff1d(indices, left_out.get(training, _NO_ROWS)))

    # A test split stays, and the validation split gets what both draws hold out.
    if "test" in splits:
        drawn["validation"] = np.concatenate([drawn["validation"], drawn.pop("test")])
    made = {split: select(np.sort(indices)) for split, indices in drawn.items()}
    if "test" in splits:
        made["test"] = usable["test"]
    for split, part in made.items():
        if not len(part):
            raise ValueError(
                f"{rows.where(0)}: no row is left for {split} with task.held_out {share}; set a "
                "larger one (task.split_by groups: or a smaller one, or write smaller row groups)"
            )
    return made


def drop_rows(rows: Any, indices: Sequence[int] | NDArray[np.int64]) -> Any:
    """Return the rows without those at these indices."""
    if not len(indices):
        return rows
    return rows.select(np.delete(np.arange(len(rows)), indices))


def _draw_splits(rows: Rows, share: float, label: str, text: str) -> dict[str, Any]:
    """Return the ascending indices of the validation and the test rows, and notes about them.

    Of each class of the column ``label`` some row is a training row. The notes are the number of
    rows that stay in train for this; and a line about distinct rows, and about values of the column
    ``text`` that are in train and in another split.
    """
    # Draw a number for each row from its content, so that equal rows get equal numbers.
    names = sorted(rows.types)
    numbers = [np.zeros(0, np.uint64)]
    texts = list[int]()
    for arrays in tracked(zip(*map(rows.values, names), strict=True), "dividing the rows"):
        columns = [array.to_pylist() for array in arrays]
        of_rows = (number_of(names, row) for row in zip(*columns, strict=True))
        numbers.append(np.fromiter(of_rows, np.uint64))
        if text:
            texts += [hash(repr(value)) for value in columns[names.index(text)]]
    number = np.concatenate(numbers)
    drawn = number % DRAWS

    # The lowest numbers are the validation split, the next ones the test split.
    validation = np.flatnonzero(drawn < share * DRAWS)
    test = np.flatnonzero((drawn >= share * DRAWS) & (drawn < 2 * share * DRAWS))

    # There are few rows: take the two smallest numbers.
    if not len(validation) or not len(test):
        smallest = np.unique(drawn)
        if len(smallest) < 3:
            raise ValueError(
                f"{rows.where(0)}: {len(smallest)} different rows are too few for three splits"
            )
        validation = np.flatnonzero(drawn == smallest[0])
        test = np.flatnonzero(drawn == smallest[1])

    # Keep rows of rare classes in train, but do not empty a split: the message about the classes is
    # clearer.
    rare: dict[str, list[int]] = {}
    if label:
        rare = _rows_of_untrained_classes(rows, label, np.concatenate([validation, test]))
        rare_rows = [*chain.from_iterable(rare.values())]
        kept = np.setdiff1d(validation, rare_rows), np.setdiff1d(test, rare_rows)
        if all(map(len, kept)):
            validation, test = kept
        else:
            rare = {}

    # Count what repeats.
    notes = []
    if text:
        of_text = np.array(texts)
        held_out = np.concatenate([validation, test])
        shared = np.intersect1d(of_text[held_out], np.delete(of_text, held_out))
        notes.append(
            f"{len(np.unique(number)):,} of {len(number):,} rows are distinct (equal rows share a "
            f"split); {len(shared):,} different values of {text!r} are both in train and in a "
            "split drawn from it"
        )
    if rare:
        shown = ", ".join(f"{name} ({len(rare[name])})" for name in [*rare][:5])
        notes.append(
            f"{sum(map(len, rare.values())):,} rows stay in train, because no other row of their "
            f"class was drawn for it: {shown}"
        )
    return {"validation": validation.tolist(), "test": test.tolist(), "notes": notes}


def _rows_of_untrained_classes(
    rows: Rows, label: str, held_out: NDArray[np.int64]
) -> dict[str, list[int]]:
    """Return the held-out rows of classes that no training row has, by class.

    Args:
        rows: the rows.
        label: column of the class, or of lists of classes; one of numbers with fractions is none.
        held_out: indices of the rows of validation and test.
    """
    import pyarrow

    is_held_out = np.zeros(len(rows), dtype=bool)
    is_held_out[held_out] = True
    trained = set[str]()
    others: dict[str, list[int]] = {}  # held-out rows by class
    before = 0
    for array in rows.values(label):
        kind = array.type
        if pyarrow.types.is_nested(kind) and not pyarrow.types.is_struct(kind):
            kind = kind.value_type  # of all kinds of lists
        if pyarrow.types.is_floating(kind):
            return {}
        for index, value in enumerate(array.to_pylist(), start=before):
            for one in value if isinstance(value, list) else [value]:
                name = unicodedata.normalize("NFC", str(one))
                if not is_held_out[index]:
                    trained.add(name)
                elif one not in (None, -100):  # a tag of -100 is not trained
                    others.setdefault(name, []).append(index)
        before += len(array)
    return {name: others[name] for name in others if name not in trained}


def number_of(names: Sequence[str], row: Sequence[Any]) -> int:
    """Return a number of 64 bits from a row's content.

    Of an image, the content is its bytes, or the last two names of its path.

    Args:
        names: the columns' names.
        row: the values, one per name.
    """
    state = xxh3_64()
    for name, value in zip(names, row, strict=True):
        if isinstance(value, dict) and set(value) == {"bytes", "path"}:
            value = value["bytes"] or "/".join(Path(str(value["path"])).parts[-2:])

        if isinstance(value, bytes):
            content = value
        elif isinstance(value, str):
            content = value.encode()
        else:
            content = json.dumps(value, sort_keys=True, default=repr).encode()
        state.update(name.encode() + b"\0")
        state.update(content)
    return state.intdigest()
