"""Text that is always there: Python's own standard library; and text that the user names."""

from __future__ import annotations

import json
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "ensurepip", "turtledemo"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}


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


def local_text(where: str, *, column: str = "text") -> list[Document]:
    """Texts of a file or folder: .txt, .md, .rst, .py (one document a file), .jsonl (one a line, in ``column``).

    Raises:
        ValueError: nothing there, or a line without the column.
    """
    path = Path(where)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in {*_TEXT_SUFFIXES, ".jsonl"})
    if not files:
        raise ValueError(f"no text at {where!r}: give a file, or a folder with .txt, .md, .rst, .py or .jsonl files")
    documents = []
    for file in files:
        if file.suffix != ".jsonl":
            documents.append(Document(_below(file, path), file.read_text(errors="replace")))
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                documents.append(Document(f"{_below(file, path)}:{number}", str(json.loads(line)[column])))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: no JSON object with the key {column!r}") from error
    return documents


def _below(file: Path, root: Path) -> str:
    """The file's name as seen from the folder that the user named: where that stands does not matter."""
    return file.name if file == root else file.relative_to(root).as_posix()


def hub_text(name: str, *, column: str = "text", split: str = "train") -> list[Document]:
    """Texts of a data set on the Hugging Face hub, ``NAME`` or ``NAME:CONFIG``.

    Raises:
        ValueError: it cannot be had, or has no such column.
    """
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split)
    except Exception as error:  # datasets raises whatever its file system raised
        raise ValueError(f"data set {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if column not in rows.column_names:
        raise ValueError(f"data set {name!r} has no column {column!r}; it has {', '.join(rows.column_names)}")
    return [Document(f"{name}:{number}", text) for number, text in enumerate(rows[column])]


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
