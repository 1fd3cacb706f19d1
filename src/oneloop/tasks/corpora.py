"""Text that is always there: Python's own standard library; and text that the user names."""

from __future__ import annotations

import csv
import io
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip", "turtledemo"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_ROW_SUFFIXES = {".jsonl", ".csv"}
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
"""what files, folders and splits are called, and what they are"""


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
    known = _TEXT_SUFFIXES | _ROW_SUFFIXES
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
    if not files:
        raise ValueError(f"no text at {where!r}: give a file, or a folder with {', '.join(sorted(known))} files")
    parts: dict[str, list[Document]] = {}
    for file in files:
        split = "" if file == path else _split_of(file.relative_to(path))
        parts.setdefault(split, []).extend(_documents(file, _below(file, path), column))
    code = all(file.suffix == ".py" for file in files)
    loose = any(_split_of(file.relative_to(path)) == "validation" for file in files if file.parent == path)
    if code or ("train" not in parts and not loose):  # a folder of code or of pages may have a test/ or a dev/ too
        return {"": [document for several in parts.values() for document in several]}
    if "" in parts or "train" not in parts:
        strange = parts[""][0].name if "" in parts else "nothing to train on"
        raise ValueError(
            f"{where!r} has files of {', '.join(sorted(filter(None, parts)))}, and {strange} beside them; name what is"
            " trained on train.… or put it into a folder train/, or move the others away"
        )
    return parts


def _split_of(place: Path) -> str:
    """``train-00001.jsonl`` and ``valid/a.txt``: the part of the data that a name tells, or nothing. (A train.py is
    code.)"""
    folder = place.parts[0].lower() if len(place.parts) > 1 else ""
    file = re.split(r"[-_.]", place.name)[0].lower() if len(place.parts) == 1 and place.suffix != ".py" else ""
    return _SPLITS.get(folder) or _SPLITS.get(file, "")


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


def _below(file: Path, root: Path) -> str:
    """The file's name as seen from the folder that the user named: where that stands does not matter."""
    return file.name if file == root else file.relative_to(root).as_posix()


def hub_text(name: str, *, column: str = "text") -> dict[str, list[Document]]:
    """Texts of a data set that ``datasets`` loads, ``NAME`` or ``NAME:CONFIG``, by its own splits.

    Raises:
        ValueError: it cannot be had, has no training part or no such column, or what is in it is no text.
    """
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        splits = load_dataset(path, config or None)
    except Exception as error:  # datasets raises whatever its file system raised
        raise ValueError(f"data set {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    parts: dict[str, list[Document]] = {}
    for split, rows in splits.items():
        part = _SPLITS.get(split)
        if part is None:
            continue
        if column not in rows.column_names:
            raise ValueError(f"data set {name!r} has no column {column!r}; it has {', '.join(rows.column_names)}")
        for number, text in enumerate(rows[column]):
            if not isinstance(text, str):
                raise ValueError(
                    f"data set {name!r}, {split} {number}: {column!r} holds a {type(text).__name__}, and text is"
                    " needed; name another column with task.column"
                )
            parts.setdefault(part, []).append(Document(f"{name}:{split}:{number}", text))
    if "train" not in parts:
        raise ValueError(f"data set {name!r} has no training part; its splits are {', '.join(splits)}")
    return parts


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
