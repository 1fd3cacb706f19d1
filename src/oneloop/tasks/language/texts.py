"""Texts for language models: files, columns of rows, and the source of Python's standard library."""

import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import tracked
from oneloop.data.rows.cache import below, content_of
from oneloop.data.rows.cached_arrays import Ragged, ragged
from oneloop.data.rows.find_files import Found, found
from oneloop.data.rows.open_data import Source, checked, opened, whole
from oneloop.tasks.columns import check_texts

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip", "turtledemo"}


@dataclass(frozen=True)
class Document:
    """One text, and where it is from."""

    name: str
    text: str


def stdlib() -> list[Document]:
    """The source files of this Python's standard library, by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return [Document(path.relative_to(root).as_posix(), path.read_text(errors="replace")) for path in files]


def documents(files: Iterable[Path], root: Path) -> list[Document]:
    """Return a document for each text file, named relative to the root. Raises ValueError for other files."""
    made = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")  # some programs put a mark before it
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}; convert it, or move it away") from error
        if "\0" in text:
            raise ValueError(f"{file} is not text: it has bytes of zero; move it away")
        made.append(Document(below(file, root), text))
    return made


def divided(parts: dict[str, list[Document]], *, percent: float = 5) -> dict[str, list[Document]]:
    """Train, validation and test: as they are there; what is missing is held out of the training texts."""
    if set(parts) == {""}:
        return held_out(parts[""], percent=percent)
    if "validation" in parts:
        return parts
    rest = held_out(parts["train"], percent=percent)
    if "test" not in parts:
        return rest
    return {"train": rest["train"], "validation": rest["validation"] + rest["test"], "test": parts["test"]}


def held_out(documents: list[Document], *, percent: float = 5) -> dict[str, list[Document]]:
    """Train, validation and test, by a checksum of the document's name: the same on every machine."""
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        draw = zlib.crc32(document.name.encode()) % 100
        parts["validation" if draw < percent else "test" if draw < 2 * percent else "train"].append(document)
    for part in ("validation", "test"):
        if not parts[part] and len(parts["train"]) > 1:  # few texts: the one with the smallest checksum
            parts[part].append(min(parts["train"], key=lambda document: zlib.crc32(document.name.encode())))
            parts["train"].remove(parts[part][0])
    return parts


_IN_MEMORY = 64 << 20  # bytes of files; larger ones are converted once, and mapped
_FEW = 40  # documents, of which some could not be held out whole
_KINDS = ["parquet", "arrow", "json", "csv", "tsv", "text"]


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
        return {**self.rows.fingerprint(), "text": self.column}


def texts_of(source: Source, *, share: float, window: int) -> dict[str, Texts]:
    """Return the texts of an unopened source by split; missing splits get a ``share`` of the rows. ``window`` is in
    megabytes. Raises ValueError."""
    checked(share, window)
    where, column = source.where, source.columns["column"]
    if where == "stdlib":
        return {name: InMemory(part) for name, part in held_out(stdlib()).items()}
    there = None if where.startswith("hf:") else _found(where)
    if there is None or there.kind != "text" or _large(there):
        opened(source, held_out=share, window=window, kinds=_KINDS, check=lambda it: check_texts(it, "column"))
        return {name: InRows(rows, column) for name, rows in source.parts.items()}
    parts = {part: documents(files, there.root) for part, files in there.parts.items()}
    content = content_of(there.files, there.root)
    if "" in parts and len(parts[""]) < _FEW:
        parts = {"": _pieces(parts[""])}
    elif "validation" not in parts and "train" in parts and len(parts["train"]) < _FEW:
        parts = {**parts, "train": _pieces(parts["train"])}
    made = divided(parts, percent=100 * share)
    return {name: InMemory(part, {**content, "part": name, "share": share}) for name, part in made.items()}


def all_texts(source: Source, *, window: int) -> Texts:
    """Return all texts of an unopened source, in file order. Raises ValueError."""
    if source.where == "stdlib":
        return InMemory(stdlib())
    there = None if source.where.startswith("hf:") else _found(source.where, whole=True)
    if there is None or there.kind != "text" or _large(there):
        check_texts([whole(source, window=window, kinds=_KINDS)], "column")
        return InRows(source.parts["all"], source.columns["column"])
    return InMemory(documents(there.files, there.root), content_of(there.files, there.root))


def _large(there: Found) -> bool:
    return sum(file.stat().st_size for file in there.files) > _IN_MEMORY


def _found(where: str, *, whole: bool = False) -> Found:
    try:
        return found(where, _KINDS, whole=whole)
    except ValueError as error:
        raise ValueError(f"task.data: {error}") from error


def _pieces(documents: list[Document]) -> list[Document]:
    """Too few texts to hold some out whole, in pieces of whole lines."""
    pieces = []
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        length = max(1, len(lines) * len(documents) // 100)
        for start in range(0, len(lines), length):
            pieces.append(Document(f"{document.name}#{start}", "".join(lines[start : start + length])))
    return pieces
