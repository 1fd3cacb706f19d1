"""Rows: map-style data sets of plain values by column name, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneloop.data.order import Ordered, order_of

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

    def chosen(self, indices: NDArray[np.int64], *, but: bool = False, place: Path | None = None) -> Rows:
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
