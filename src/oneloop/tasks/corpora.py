"""Text that is always there: Python's own standard library; and text that the user names."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oneloop.data.rows.cache import below

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
            raise ValueError(f"{file} is no text in UTF-8: {error}; convert it, or move it away") from error
        if "\0" in text:
            raise ValueError(f"{file} is no text: it has bytes of zero; move it away")
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
