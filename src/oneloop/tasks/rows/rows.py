"""Rows of a data set, the samples made from them, and the validation and test splits."""

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from oneloop.basics.progress import tracked
from oneloop.data.order import Ordered, order_of
from oneloop.data.skipped_rows import SkipSample
from oneloop.tasks.rows.cache import alone, key_of, rows_content
from oneloop.tasks.rows.csv_json_lines import NOT_UNICODE

Row = dict[str, Any]


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

    def select(
        self, indices: NDArray[np.int64], *, exclude: bool = False, index_file: Path | None = None
    ) -> "Rows":
        """Return the rows at these indices, or all others.

        Args:
            indices: ascending indices of the rows to keep.
            exclude: keep all other rows instead.
            index_file: a file in which the indices can be stored.
        """


class Unreadable(ValueError):
    """A row that cannot be read, which ``task.unreadable skip`` leaves out."""


# of Parquet, an image set or a mixture; samples that are made of such rows have them, too
_OF_THE_ROWS = ("about", "announce", "fingerprint", "sources", "traffic", "waits")


class Mapped:
    """The samples that ``make`` returns for each row, in order.

    If ``make`` raises, a ValueError names the row's file and number. Optional members of the rows
    are members of the samples.

    Args:
        rows: the rows.
        make: converts a row to a sample.
        skip: raise SkipSample if a row cannot be read, so that a run leaves it out.
    """

    def __init__(self, rows: Any, make: Callable[[Any], Any], *, skip: bool = False) -> None:
        self.rows = rows
        self.make = make
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
        if not hasattr(self.rows, "where"):
            return f"row {index}"
        where: str = self.rows.where(index)
        return where

    def near(self, index: int) -> range:
        """Return the rows that are cheap to read after this one: those of its row group, or all."""
        if not hasattr(self.rows, "near"):
            return range(len(self))
        near: range = self.rows.near(index)
        return near

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return the order that the rows define, or a permutation."""
        return order_of(self.rows, seed=seed, batch=batch, shuffle=shuffle)

    def __getattr__(self, name: str) -> Any:
        # Only a method that is missing here is looked up; a copy has no rows yet.
        if name not in _OF_THE_ROWS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.rows, name)


DRAWS = 1_000_000
"""numbers below this are drawn for rows and groups"""
_DRAW_VERSION = 2  # increase it if other rows are drawn from the same content
_NO_ROWS = np.zeros(0, dtype=np.int64)


def divided(
    splits: Mapping[str, Rows],
    share: float,
    unusable: Mapping[str, NDArray[np.int64]] | None = None,
    *,
    label: str = "",
    text: str = "",
    notes: list[str] | None = None,
) -> dict[str, Rows]:
    """Return train, validation and test rows; take the missing splits from the training rows.

    Existing splits stay, and rows of equal content are in the same split. If there is a validation
    split, a missing test split stays missing.

    Args:
        splits: the rows by split; all under ``""`` if there are no splits.
        share: share of the training rows for each of validation and test. If only a test split
            exists, validation gets both shares.
        unusable: ascending indices of the rows to leave out, by split.
        label: column of the class: rows of a class without training rows stay in train.
        text: column whose values are counted that are in train and in another drawn split.
        notes: gets lines about these rows, and about rows that repeat.

    Raises:
        ValueError: there are too few rows.
    """
    unusable = unusable or {}
    for split, indices in unusable.items():
        if len(indices) and len(indices) == len(splits[split]):
            raise ValueError(
                f"{splits[split].where(0)}: no row of the {split or 'whole'} set can be used"
            )

    if "validation" in splits:
        return {split: without(rows, unusable.get(split)) for split, rows in splits.items()}

    training = "train" if "train" in splits else ""
    rows = splits[training]
    if len(rows) < 3:
        where = rows.where(0) if len(rows) else "the data"
        about = getattr(rows, "about_rows", "")
        raise ValueError(f"{where}: {len(rows)} rows are too few for three splits{about}")

    # Draw from all rows, so that the splits do not depend on which rows are left out.
    out = unusable.get(training, _NO_ROWS)
    key = key_of(_DRAW_VERSION, rows_content(rows), share, label, text)
    with alone(f"held-out/{key}.npz") as path:
        validation, test, rare, repeats = _draw_splits(rows, share, path, label, text)
        notes = [] if notes is None else notes
        notes += repeats
        if rare:
            shown = ", ".join(f"{name} ({count})" for name, count in [*rare.items()][:5])
            notes.append(
                f"{sum(rare.values()):,} rows stay in train, because no other row of their class "
                f"was drawn for it: {shown}"
            )
        if "test" in splits:
            # The validation split gets the rows of both draws.
            validation = np.sort(np.concatenate([validation, test]))
            test = _NO_ROWS
        others = np.union1d(np.concatenate([validation, test]), out)

        # Name the index file by what it leaves out: other calls share this cache entry.
        suffix = f".{len(others)}.arrow"
        if len(out):
            suffix = f".{len(others)}-{key_of(out.tolist())}.arrow"
        train = rows.select(others, exclude=True, index_file=path.with_suffix(suffix))

    made = {"train": train, "validation": rows.select(np.setdiff1d(validation, out))}
    if "test" in splits:
        made["test"] = without(splits["test"], unusable.get("test"))
    else:
        made["test"] = rows.select(np.setdiff1d(test, out))

    for split, kept in made.items():
        if not len(kept):
            raise ValueError(
                f"{rows.where(0)}: no row is left for {split}; set a larger task.held_out"
            )
    return made


def without(rows: Rows, out: NDArray[np.int64] | None) -> Rows:
    """Return the rows without those at the ascending indices ``out`` (None: all rows)."""
    if out is None or not len(out):
        return rows
    return rows.select(out, exclude=True)


def _draw_splits(
    rows: Rows, share: float, path: Path, label: str, text: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int], list[str]]:
    """Return the indices of the validation and the test rows; cache them in a file.

    Of each class of the column ``label`` some row is a training row. Also return how many rows stay
    in train for this, by class; and a line about distinct rows, and about values of the column
    ``text`` that are in train and in another split.
    """
    try:
        with np.load(path) as cached:
            return cached["validation"], cached["test"], *json.loads(str(cached["found"]))
    except (OSError, ValueError, KeyError, BadZipFile):
        pass  # missing or damaged: recomputed below

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

    rare: dict[str, int] = {}
    if label:
        only, of_class = _without_training_rows(rows, label, np.concatenate([validation, test]))
        kept = np.setdiff1d(validation, only), np.setdiff1d(test, only)
        # Do not empty a split: the message about the classes is clearer.
        if all(map(len, kept)):
            validation, test = kept
            rare = of_class

    # Count what repeats.
    repeats = []
    if text:
        of_text = np.array(texts)
        held_out = np.concatenate([validation, test])
        shared = np.intersect1d(of_text[held_out], np.delete(of_text, held_out))
        repeats.append(
            f"{len(np.unique(number)):,} of {len(number):,} rows are distinct (equal rows share a "
            f"split); {len(shared):,} different values of {text!r} are both in train and in a "
            "split drawn from it"
        )

    # Replace the file as a whole: a process that is killed here leaves no half of it.
    draft = path.with_suffix(f".{os.getpid()}.npz")
    found = json.dumps([rare, repeats])
    np.savez(draft, validation=validation, test=test, found=found)
    draft.replace(path)
    return validation, test, rare, repeats


def _without_training_rows(
    rows: Rows, label: str, held_out: NDArray[np.int64]
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Return the held-out rows of classes that no training row has, and their number by class.

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
            return _NO_ROWS, {}
        for index, value in enumerate(array.to_pylist(), start=before):
            for one in value if isinstance(value, list) else [value]:
                name = unicodedata.normalize("NFC", str(one))
                if not is_held_out[index]:
                    trained.add(name)
                elif one not in (None, -100):  # a tag of -100 is not trained
                    others.setdefault(name, []).append(index)
        before += len(array)

    rare = {name: found for name, found in others.items() if name not in trained}
    if not rare:
        return _NO_ROWS, {}
    only = [index for found in rare.values() for index in found]
    return np.unique(only), {name: len(found) for name, found in rare.items()}


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
