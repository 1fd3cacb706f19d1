"""Texts to train a language model on: of a few files in memory, of many or large ones where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import tracked
from oneloop.data.rows.cache import content_of
from oneloop.data.rows.ragged import Ragged, ragged
from oneloop.data.rows.sources import Source, opened
from oneloop.tasks.columns import check_texts
from oneloop.tasks.corpora import Document, divided, held_out, local_text, stdlib, text_files

_IN_MEMORY = 64 << 20
"""bytes of files; larger ones are converted once, and mapped"""
_FEW = 40
"""documents, of which some could not be held out whole"""
_ENDINGS = ["parquet", "arrow", "json", "csv", "text"]


class Texts(Protocol):
    """Texts one after another."""

    def __iter__(self) -> Iterator[str]: ...

    def tokens(self, encode: Callable[[str], NDArray[np.int32]], *, made_by: Any, what: str) -> Ragged:
        """Each text's tokens; ``made_by`` tells this tokenizer from others."""

    def fingerprint(self) -> dict[str, Any] | None:
        """What the texts are, by content; None where they do not tell."""


class InMemory:
    """Documents, and what the files are that they are from."""

    def __init__(self, documents: list[Document], content: dict[str, Any] | None = None) -> None:
        self.documents, self.content = documents, content

    def __iter__(self) -> Iterator[str]:
        return (one.text for one in self.documents)

    def tokens(self, encode: Callable[[str], NDArray[np.int32]], *, made_by: Any, what: str) -> Ragged:
        made = [encode(text) for text in tracked(self, what, total=len(self.documents))]
        joined = np.concatenate(made) if made else np.zeros(0, dtype=np.int32)
        return Ragged(joined, np.cumsum([len(one) for one in made], dtype=np.int64))

    def fingerprint(self) -> dict[str, Any] | None:
        return self.content


class InRows:
    """A column of rows; its tokens are made once, and mapped from the cache."""

    def __init__(self, rows: Any, column: str) -> None:
        self.rows, self.column = rows, column

    def __iter__(self) -> Iterator[str]:
        for array in self.rows.values(self.column):
            yield from array.to_pylist()

    def tokens(self, encode: Callable[[str], NDArray[np.int32]], *, made_by: Any, what: str) -> Ragged:
        return ragged(self.rows, lambda row: encode(row[self.column]), made_by=made_by, what=what)

    def fingerprint(self) -> dict[str, Any]:
        content: dict[str, Any] = self.rows.fingerprint()
        return content


def texts_of(source: Source, *, share: float, window: int) -> dict[str, Texts]:
    """The texts of a place by part: train, validation and, where there is enough, test.

    Args:
        source: not opened; its column is ``column``.
        share: of the rows for validation, and as much for test, where there are no such parts.
        window: megabytes of parquet rows that a process may hold.

    Raises:
        ValueError: what is wrong with it.
    """
    where, column = source.where, source.columns["column"]
    if where == "stdlib":
        return {name: InMemory(part) for name, part in held_out(stdlib()).items()}
    path = Path(where).expanduser()
    if where.startswith("hf:") or not _fits(path):
        opened(source, held_out=share, window=window, kinds=_ENDINGS)
        check_texts([source], "column")
        return {name: InRows(rows, column) for name, rows in source.parts.items()}
    parts = local_text(where, column=column)
    content = content_of(text_files(path), path)
    if "" in parts and len(parts[""]) < _FEW:
        parts = {"": _pieces(parts[""])}
    elif "validation" not in parts and "train" in parts and len(parts["train"]) < _FEW:
        parts = {**parts, "train": _pieces(parts["train"])}
    return {name: InMemory(part, {**content, "part": name}) for name, part in divided(parts).items()}


def _fits(path: Path) -> bool:
    """Whether what lies there are few enough texts to be held in memory; also where nothing does: it is told then."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if any(file.suffix in (".parquet", ".arrow", ".tsv", ".ndjson") for file in files):
        return False
    return sum(file.stat().st_size for file in text_files(path)) <= _IN_MEMORY if path.exists() else True


def _pieces(documents: list[Document]) -> list[Document]:
    """Too few texts to hold some out whole, in pieces of whole lines."""
    pieces = []
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        length = max(1, len(lines) * len(documents) // 100)
        for start in range(0, len(lines), length):
            pieces.append(Document(f"{document.name}#{start}", "".join(lines[start : start + length])))
    return pieces
