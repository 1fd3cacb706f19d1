"""Rows of a data set, the samples made from them, and the validation and test splits."""

import json
import os
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
from oneloop.data.rows.cache import alone, key_of

Row = dict[str, Any]


@dataclass
class Findings:
    """The result of ``oneloop check``: position and reason of each row that cannot be used, the
    number of images that are converted by kind, and class folders without images. ``values``:
    whether the values of the rows were checked."""

    rows: int = 0
    values: bool = True
    unusable: list[tuple[str, str]] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)
    empty: list[str] = field(default_factory=list)


FINDINGS: ContextVar[Findings | None] = ContextVar("FINDINGS", default=None)
"""where :func:`unusable` collects rows; None: it raises"""


def unusable(where: str, why: str) -> None:
    """Raise ValueError about a row (``where``: file and number); during ``oneloop check`` add it to
    the findings."""
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
        """Return the rows of ascending ``indices``, or (``exclude``) all others; ``index_file`` may
        store them."""


class Mapped:
    """The samples that ``make`` returns for each row, in order. A ValueError names the row's file
    and number."""

    def __init__(self, rows: Any, make: Callable[[Any], Any]) -> None:
        self.rows, self.make = rows, make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        try:
            return self.make(row)
        except Exception as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def where(self, index: int) -> str:
        """Return file and number of a row for messages."""
        return self.rows.where(index) if hasattr(self.rows, "where") else f"row {index}"

    def near(self, index: int) -> range:
        """Return the rows that are cheap to read after this one: those of its row group, or all."""
        return self.rows.near(index) if hasattr(self.rows, "near") else range(len(self))

    def order(self, *, seed: int, batch: int) -> Ordered:
        """Return the order that the rows define, or a permutation."""
        return order_of(self.rows, seed=seed, batch=batch)

    @property
    def sources(self) -> dict[str, range]:
        """Return the range of each data set if the rows are a mixture."""
        return getattr(self.rows, "sources", {})

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint of the rows; None if they have none."""
        return self.rows.fingerprint() if hasattr(self.rows, "fingerprint") else None

    def about(self) -> str | None:
        """Return how the rows are read, for the log; None if there is nothing to report."""
        return self.rows.about() if hasattr(self.rows, "about") else None


_DRAWS = 1_000_000


def divided(
    splits: Mapping[str, Rows],
    share: float,
    unusable: Mapping[str, NDArray[np.int64]] | None = None,
) -> dict[str, Rows]:
    """Return train, validation and test rows. Existing splits stay; missing ones get ``share`` of
    the training rows. Rows of equal content are in the same split. Indices in ``unusable`` (by
    split) are left out. Raises ValueError if there are too few rows."""
    wrong = {split: indices for split, indices in (unusable or {}).items() if len(indices)}
    for split, indices in wrong.items():
        if len(indices) == len(splits[split]):
            raise ValueError(
                f"{splits[split].where(0)}: no row of the {split or 'whole'} set can be used"
            )
    if "validation" in splits:
        return {
            k: rows.select(wrong[k], exclude=True) if k in wrong else rows
            for k, rows in splits.items()
        }
    rows = splits.get("train", splits.get(""))
    assert rows is not None
    out = next(
        (wrong[split] for split in ("train", "") if split in wrong), np.zeros(0, dtype=np.int64)
    )
    if len(rows) < 3:
        raise ValueError(
            f"{rows.where(0) if len(rows) else 'the data'}: {len(rows)} rows are too few for "
            "three splits"
        )
    with alone(f"held-out/{key_of(rows.fingerprint(), share)}.npz") as path:
        validation, test = _draw_splits(rows, share, path)
        if "test" in splits:
            validation, test = np.sort(np.concatenate([validation, test])), test[:0]
        others = np.union1d(np.concatenate([validation, test]), out)
        index_file = path.with_suffix(
            f".{len(others)}{f'-{key_of(out.tolist())}' if len(out) else ''}.arrow"
        )
        train = rows.select(others, exclude=True, index_file=index_file)
    made = {"train": train, "validation": rows.select(np.setdiff1d(validation, out))}
    if "test" in splits:
        made["test"] = (
            splits["test"].select(wrong["test"], exclude=True)
            if "test" in wrong
            else splits["test"]
        )
    else:
        made["test"] = rows.select(np.setdiff1d(test, out))
    if empty := [split for split, kept in made.items() if not len(kept)]:
        raise ValueError(
            f"{rows.where(0)}: no row is left for {empty[0]}; set a larger task.held_out"
        )
    return made


def _draw_splits(
    rows: Rows, share: float, path: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the validation and the test rows; cache them in a file."""
    try:
        with np.load(path) as cached:
            return cached["validation"], cached["test"]
    except (OSError, ValueError, KeyError, BadZipFile):
        pass  # missing or damaged: recomputed below
    names = sorted(rows.types)
    draws = [np.zeros(0, dtype=np.int32)]
    for arrays in tracked(zip(*map(rows.values, names), strict=True), "dividing the rows"):
        columns = [array.to_pylist() for array in arrays]
        draws.append(
            np.fromiter((draw(names, row) for row in zip(*columns, strict=True)), np.int32)
        )
    drawn = np.concatenate(draws)
    validation = np.flatnonzero(drawn < share * _DRAWS)
    test = np.flatnonzero((drawn >= share * _DRAWS) & (drawn < 2 * share * _DRAWS))
    if not len(validation) or not len(test):  # few rows: take the two smallest draws
        smallest = np.unique(drawn)
        if len(smallest) < 3:
            raise ValueError(
                f"{rows.where(0)}: {len(smallest)} different rows are too few for three splits"
            )
        validation, test = (np.flatnonzero(drawn == draw) for draw in smallest[:2])
    draft = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(draft, validation=validation, test=test)
    draft.replace(path)
    return validation, test


def draw(names: Sequence[str], row: Sequence[Any]) -> int:
    """Return a number below a million from a row's content: an image's bytes, or the last two names
    of its path."""
    state = xxh3_64()
    for name, value in zip(names, row, strict=True):
        if isinstance(value, dict) and set(value) == {"bytes", "path"}:
            value = value["bytes"] or "/".join(Path(str(value["path"])).parts[-2:])
        state.update(name.encode() + b"\0")
        if isinstance(value, str):
            value = value.encode()
        state.update(
            value
            if isinstance(value, bytes)
            else json.dumps(value, sort_keys=True, default=repr).encode()
        )
    return state.intdigest() % _DRAWS
