"""Rows of a data set, samples made of them, and rows held out for validation and test."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Rows(Protocol):
    """Rows of a table, as ``{column: value}``; of images and sounds the bytes or the path, as they are stored."""

    @property
    def types(self) -> Mapping[str, Any]:
        """What the columns hold: features of ``datasets`` by name."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """The place of a row, for a person: file and row."""

    def fingerprint(self) -> dict[str, Any]:
        """What the rows are, by content: the same wherever and whenever they lie."""

    def values(self, column: str) -> Iterator[Any]:
        """A column as arrow arrays, in the order of the rows."""

    def chosen(self, indices: NDArray[np.int64], *, but: bool = False, place: Path | None = None) -> "Rows":
        """Return the rows of ascending ``indices``, or (``but``) all others; ``place`` may store the indices on
        disk."""


class Mapped:
    """Samples that ``make`` returns for each row, in the rows' own order. A ValueError names the row's file and
    number."""

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
        """The place of the row, for a person."""
        return self.rows.where(index) if hasattr(self.rows, "where") else f"row {index}"

    def near(self, index: int) -> range:
        """Rows that are read as cheaply once this one is: all of them, or those of its row group."""
        return self.rows.near(index) if hasattr(self.rows, "near") else range(len(self))

    def order(self, *, seed: int, batch: int) -> Ordered:
        """The rows' own, or a permutation of them."""
        return order_of(self.rows, seed=seed, batch=batch)

    @property
    def sources(self) -> dict[str, range]:
        """The rows' own, where they are of several sets."""
        return getattr(self.rows, "sources", {})

    def fingerprint(self) -> dict[str, Any] | None:
        """What the rows are; None where they do not tell."""
        return self.rows.fingerprint() if hasattr(self.rows, "fingerprint") else None

    def about(self) -> str | None:
        """How the rows are read, for a person; None where there is nothing to say."""
        return self.rows.about() if hasattr(self.rows, "about") else None


_DRAWS = 1_000_000


def divided(parts: Mapping[str, Rows], share: float) -> dict[str, Rows]:
    """Return train, validation and test rows: given splits stay, missing ones are held out of the training rows
    (``share`` for each). Rows of equal content are in the same split. Raises ValueError if there are too few rows."""
    if "validation" in parts:
        return dict(parts)
    rows = parts.get("train", parts.get(""))
    assert rows is not None
    if len(rows) < 3:
        raise ValueError(f"{rows.where(0) if len(rows) else 'the data'}: {len(rows)} rows are too few to hold some out")
    with alone(f"held-out/{key_of(rows.fingerprint(), share)}.npz") as place:
        validation, test = _drawn(rows, share, place)
        if "test" in parts:
            validation, test = np.sort(np.concatenate([validation, test])), test[:0]
        both = np.sort(np.concatenate([validation, test]))
        train = rows.chosen(both, but=True, place=place.with_suffix(f".{len(both)}.arrow"))
    made = {"train": train, "validation": rows.chosen(validation)}
    made["test"] = parts["test"] if "test" in parts else rows.chosen(test)
    return made


def _drawn(rows: Rows, share: float, place: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the rows for validation and for test, kept in a file."""
    try:
        with np.load(place) as kept:
            return kept["validation"], kept["test"]
    except (OSError, ValueError, KeyError, BadZipFile):
        pass  # not there, or damaged: it is made anew
    names = sorted(rows.types)
    draws = [np.zeros(0, dtype=np.int32)]
    for arrays in tracked(zip(*map(rows.values, names), strict=True), "dividing the rows"):
        columns = [array.to_pylist() for array in arrays]
        draws.append(np.fromiter((draw(names, row) for row in zip(*columns, strict=True)), np.int32))
    drawn = np.concatenate(draws)
    validation = np.flatnonzero(drawn < share * _DRAWS)
    test = np.flatnonzero((drawn >= share * _DRAWS) & (drawn < 2 * share * _DRAWS))
    if not len(validation) or not len(test):  # few rows: those with the smallest
        smallest = np.unique(drawn)
        if len(smallest) < 3:
            raise ValueError(f"{rows.where(0)}: {len(smallest)} different rows are too few to hold some out")
        validation, test = (np.flatnonzero(drawn == draw) for draw in smallest[:2])
    draft = place.with_suffix(f".{os.getpid()}.npz")
    np.savez(draft, validation=validation, test=test)
    draft.replace(place)
    return validation, test


def draw(names: Sequence[str], row: Sequence[Any]) -> int:
    """A number below a million from what a row holds. Of a file its last two names count, of an image its bytes."""
    state = xxh3_64()
    for name, value in zip(names, row, strict=True):
        if isinstance(value, dict) and set(value) == {"bytes", "path"}:
            value = value["bytes"] or "/".join(Path(str(value["path"])).parts[-2:])
        state.update(name.encode() + b"\0")
        if isinstance(value, str):
            value = value.encode()
        state.update(value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=repr).encode())
    return state.intdigest() % _DRAWS
