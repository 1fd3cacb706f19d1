"""Texts for language models: files of text as rows, and Python's standard library."""

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.rows.cache import below, content_of, key_of
from oneloop.tasks.rows.rows import Row

STDLIB = "stdlib"
"""value of ``task.data`` for the source of Python's standard library"""
_EXCLUDED = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "ensurepip",
    "turtledemo",
}


@dataclass(frozen=True)
class TextFile:
    """A text file, or a part of it.

    Args:
        path: the file.
        root: the folder of the data set, or its only file.
        start: number of the first character.
        stop: number of the character after the last one; None: the part ends with the file.
    """

    path: Path
    root: Path
    start: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        """Path relative to the root."""
        return below(self.path, self.root)

    @property
    def text(self) -> str:
        """Text of the part. Raise ValueError if the file is not text."""
        try:
            # Some programs write a byte order mark.
            text = self.path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8 text: {error}; convert it, or move it away"
            ) from error
        if "\0" in text:
            raise ValueError(f"{self.path} is not text: it has bytes of zero; move it away")
        return text[self.start : self.stop]


class TextFiles:
    """Rows of which each is a text file, or a part of one (:class:`oneloop.tasks.rows.rows.Rows`).

    Args:
        files: the files.
        column: name of the column of their texts. The column ``ends`` is False if the text
            continues elsewhere.
    """

    def __init__(self, files: Sequence[TextFile], column: str = "text") -> None:
        self.files = files
        self.column = column

    @property
    def types(self) -> dict[str, Any]:
        from datasets import Value

        return {self.column: Value("large_string")}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Row:
        file = self.files[index]
        return {self.column: file.text, "ends": file.stop is None}

    def where(self, index: int) -> str:
        return str(self.files[index].path)

    def fingerprint(self) -> dict[str, Any]:
        parts = [(file.start, file.stop) for file in self.files]
        content = content_of([file.path for file in self.files], self.files[0].root)
        return {**content, "parts": key_of(parts)}

    def values(self, column: str) -> Iterator[Any]:
        import pyarrow

        for file in self.files:
            yield pyarrow.array([file.text], pyarrow.large_string())

    def select(self, indices: NDArray[np.int64]) -> "TextFiles":
        return TextFiles([self.files[row] for row in indices], self.column)


def stdlib() -> list[TextFile]:
    """Return the source files of this Python's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not _EXCLUDED & set(path.relative_to(root).parts)
    )
    return [TextFile(path, root) for path in files]


def held_out_files(files: Sequence[TextFile], *, percent: float = 5) -> dict[str, list[TextFile]]:
    """Divide files into train, validation and test; ``percent`` for each of the last two.

    A checksum of the name decides, so that the splits are the same on every machine.
    """
    splits: dict[str, list[TextFile]] = {"train": [], "validation": [], "test": []}
    for file in files:
        bucket = zlib.crc32(file.name.encode()) % 100
        if bucket < percent:
            splits["validation"].append(file)
        elif bucket < 2 * percent:
            splits["test"].append(file)
        else:
            splits["train"].append(file)
    return splits


def cut_ends(training: TextFiles, share: float, test: Any) -> dict[str, Any]:
    """Return splits of which validation and test are the ends of the training texts.

    Args:
        training: the training texts.
        share: share of each text for each missing split.
        test: the test split; None: it is missing. If it exists, validation gets both shares.

    Raises:
        ValueError: all texts are too short.
    """
    ends = [1 - 2 * share, 1 - share] if test is None else [1 - 2 * share]
    parts: dict[str, list[TextFile]] = {"train": [], "validation": [], "test": []}
    for file in training.files:
        text = file.text
        cuts = [_break(text, round(len(text) * end), share) for end in ends]
        if sorted({0, *cuts, len(text)}) != [0, *cuts, len(text)]:
            parts["train"].append(file)  # it is too short
            continue
        for split, start, stop in zip(parts, [0, *cuts], [*cuts, None], strict=False):
            parts[split].append(replace(file, start=start, stop=stop))
    if not parts["validation"]:
        raise ValueError(
            f"task.data: {training.files[0].name} is too short to hold out its end; give files for "
            "training and validation"
        )
    splits = {split: TextFiles(files, training.column) for split, files in parts.items()}
    return splits if test is None else {**splits, "test": test}


def _break(text: str, at: int, share: float) -> int:
    """Return an index near ``at`` to cut a text: after a line, else after a word."""
    end = at + max(1, round(len(text) * share / 2))
    for separator in ("\n", " "):
        index = text.find(separator, max(0, at - 1), end)
        if index >= 0:
            return index + 1
    return at
