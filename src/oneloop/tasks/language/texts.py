"""Texts for language models: a column of rows, files of text, and Python's standard library."""

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.columns import check_texts
from oneloop.tasks.rows.cache import below, content_of, key_of
from oneloop.tasks.rows.find_files import found
from oneloop.tasks.rows.open_data import Source, checked, opened, whole
from oneloop.tasks.rows.row_group_splits import check_split_by
from oneloop.tasks.rows.rows import Row, divided

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
_TABLES = ("parquet", "arrow", "json", "csv", "tsv")
_FEW = 3  # fewer files cannot be divided into training, validation and test


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
    """Rows of which each is a text file, or a part of one (see ``Rows`` of :mod:`.rows.rows`).

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


def held_out(files: Sequence[TextFile], *, percent: float = 5) -> dict[str, list[TextFile]]:
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


def open_texts(source: Source, *, share: float, window: int) -> None:
    """Open the texts of a source: rows with a column of texts, by split.

    Args:
        source: is changed: its ``parts`` and its ``notes``.
        share: share of the texts for each missing split.
        window: megabytes of parquet rows in memory.

    Raises:
        ValueError: the source cannot be used.
    """
    checked(share, window)
    splits = _text_files(source)
    if splits is None:
        check = partial(check_texts, key="column")
        opened(source, held_out=share, window=window, kinds=_TABLES, check=check)
        return
    check_split_by(source.where, splits, source.split_by)
    training = splits.get("train") or splits[""]
    if source.where == STDLIB:
        for name, files in held_out(training.files).items():
            source.parts[name] = TextFiles(files, training.column)
    elif "validation" in splits or len(training) >= _FEW:
        source.parts = divided(splits, share, text=training.column, notes=source.notes)
    else:
        source.parts = _cut(training, share, splits.get("test"))
        source.notes.append(
            f"{source.where}: the end of each file is held out, because {len(training)} cannot be "
            "divided; see task.held_out"
        )


def open_all_texts(source: Source, *, window: int) -> None:
    """Open all texts of a source, in file order, as the part ``all``.

    Args:
        source: is changed: its ``parts``.
        window: megabytes of parquet rows in memory.

    Raises:
        ValueError: the source cannot be used.
    """
    splits = _text_files(source, whole=True)
    if splits is None:
        check_texts([whole(source, window=window, kinds=_TABLES)], "column")
    else:
        source.parts = {"all": splits[""]}


def _text_files(source: Source, *, whole: bool = False) -> dict[str, TextFiles] | None:
    """Return the text files of a source as rows, by split; None if it has rows of tables."""
    column = source.columns["column"]
    if source.where == STDLIB:
        return {"": TextFiles(stdlib(), column)}
    if source.where.startswith("hf:"):
        return None
    try:
        files = found(source.where, [*_TABLES, "text"], whole=whole)
    except ValueError as error:
        raise ValueError(f"task.data: {error}") from error
    if files.kind != "text":
        return None
    source.notes += files.notes
    splits = {}
    for split, paths in files.parts.items():
        splits[split] = TextFiles([TextFile(path, files.root) for path in paths], column)
    return splits


def _cut(training: TextFiles, share: float, test: TextFiles | None) -> dict[str, TextFiles]:
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
