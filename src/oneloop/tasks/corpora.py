"""Text that is always there: Python's own standard library; and text that the user names."""

from __future__ import annotations

import csv
import io
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneloop.data.rows.cache import below
from oneloop.data.rows.found import parted

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip", "turtledemo"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_ROW_SUFFIXES = {".jsonl", ".csv"}


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


def local_text(where: str, *, column: str = "text") -> dict[str, list[Document]]:
    """Texts of a file or folder: .txt, .md, .rst, .py (one document a file), .jsonl, .csv (one a row, in ``column``).

    Returns:
        By split, where files or folders in it are named train, validation (valid, val, dev, eval) or test; all of them
        under ``""`` where none is.

    Raises:
        ValueError: nothing there, what is no text, or splits of which only some are named.
    """
    path = Path(where).expanduser()
    files = text_files(path)
    if not files:
        known = ", ".join(sorted(_TEXT_SUFFIXES | _ROW_SUFFIXES))
        raise ValueError(f"no text at {where!r}: give a file, or a folder with {known} files")
    return {
        part: [document for file in several for document in _documents(file, below(file, path), column)]
        for part, several in parted(files, path).items()
    }


def text_files(path: Path) -> list[Path]:
    """The files of text at a path, or the file itself."""
    known = _TEXT_SUFFIXES | _ROW_SUFFIXES
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())


def _documents(file: Path, name: str, column: str) -> list[Document]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # some programs put a mark before it
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}; convert it, or move it away") from error
    if "\0" in text:
        raise ValueError(f"{file} is no text: it has bytes of zero; move it away")
    if file.suffix not in _ROW_SUFFIXES:
        if file.suffix not in _TEXT_SUFFIXES and file.suffix in (".parquet", ".json", ".arrow", ".tsv", ".gz", ".zip"):
            raise ValueError(f"{file}: {file.suffix} files are not read; convert it to .jsonl, .csv or plain text")
        return [Document(name, text)]
    rows = _csv_rows(file, text, column) if file.suffix == ".csv" else _json_rows(file, text, column)
    documents = []
    for number, value in rows:
        if not isinstance(value, str):
            raise ValueError(
                f"{file}, line {number}: {column!r} holds a {type(value).__name__}, and text is needed; name another"
                " column with task.column, or write its text out"
            )
        documents.append(Document(f"{name}:{number}", value))
    return documents


def _json_rows(file: Path, text: str, column: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)[column]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: no JSON object with the key {column!r}") from error


def _csv_rows(file: Path, text: str, column: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(1 << 31)  # a whole document may stand in one
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if column not in (rows.fieldnames or []):
        raise ValueError(
            f"{file} has no column {column!r}; its first line has {', '.join(rows.fieldnames or [])}; name one of them"
            " with task.column"
        )
    try:
        for row in rows:
            yield rows.line_num, row[column]
    except csv.Error as error:
        raise ValueError(f"{file}, line {rows.line_num}: {error}") from error


def divided(parts: dict[str, list[Document]]) -> dict[str, list[Document]]:
    """Train, validation and test: as they are there; what is missing is held out of the training texts."""
    if set(parts) == {""}:
        return held_out(parts[""])
    if "validation" in parts:
        return parts
    rest = held_out(parts["train"])
    if "test" not in parts:
        return rest
    return {"train": rest["train"], "validation": rest["validation"] + rest["test"], "test": parts["test"]}


def held_out(documents: list[Document], *, percent: int = 5) -> dict[str, list[Document]]:
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
