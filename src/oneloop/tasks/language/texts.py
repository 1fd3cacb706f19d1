"""Texts for language models: files, columns of rows, and Python's standard library."""

import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import tracked
from oneloop.tasks.columns import check_texts
from oneloop.tasks.rows.cache import below, content_of, rows_content
from oneloop.tasks.rows.cached_arrays import Ragged, make_shard, ragged, remark_lines
from oneloop.tasks.rows.find_files import Found, found
from oneloop.tasks.rows.open_data import Source, checked, opened, whole
from oneloop.tasks.rows.row_group_splits import check_split_by

Encode = Callable[[str], NDArray[np.int32]]  # text -> tokens

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
class Document:
    """A text, or a part of one.

    Args:
        name: a relative path.
        text: the text.
        ends: whether the text ends here, so that an end token follows.
    """

    name: str
    text: str
    ends: bool = True


def stdlib() -> list[Document]:
    """Return the source files of this Python's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not _EXCLUDED & set(path.relative_to(root).parts)
    )
    made = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        made.append(Document(path.relative_to(root).as_posix(), text))
    return made


def documents(files: Iterable[Path], root: Path) -> list[Document]:
    """Return a document for each text file, named relative to the root; ValueError for others."""
    made = []
    for file in files:
        try:
            # Some programs write a byte order mark.
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text: {error}; convert it, or move it away"
            ) from error
        if "\0" in text:
            raise ValueError(f"{file} is not text: it has bytes of zero; move it away")
        made.append(Document(below(file, root), text))
    return made


def divided(parts: dict[str, list[Document]], *, percent: float = 5) -> dict[str, list[Document]]:
    """Return the splits train, validation and test.

    Args:
        parts: documents by split; all under "" if the data has no splits. Missing splits are
            taken from the training documents.
        percent: share of the documents for each missing split.
    """
    if set(parts) == {""}:
        return held_out(parts[""], percent=percent)
    if "validation" in parts:
        return parts
    splits = held_out(parts["train"], percent=percent)
    if "test" not in parts:
        return splits
    # Only validation is missing, so it gets both shares.
    return {
        "train": splits["train"],
        "validation": splits["validation"] + splits["test"],
        "test": parts["test"],
    }


def held_out(documents: list[Document], *, percent: float = 5) -> dict[str, list[Document]]:
    """Split documents into train, validation and test; ``percent`` for each of the last two.

    A checksum of the name decides, so that the splits are the same on every machine.
    """
    splits: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        bucket = _checksum(document) % 100
        if bucket < percent:
            splits["validation"].append(document)
        elif bucket < 2 * percent:
            splits["test"].append(document)
        else:
            splits["train"].append(document)

    # Few documents: move the one with the smallest checksum into an empty split.
    for split in ("validation", "test"):
        if not splits[split] and len(splits["train"]) > 1:
            smallest = min(splits["train"], key=_checksum)
            splits[split].append(smallest)
            splits["train"].remove(smallest)
    return splits


def _checksum(document: Document) -> int:
    return zlib.crc32(document.name.encode())


_IN_MEMORY = 64 << 20  # bytes of files; larger data are converted once and memory-mapped
_CUT = 128 << 20  # bytes of one or two files that are cut in memory for the validation split
_HELD_OUT = ("validation", "test")
_FEW = 3  # fewer files cannot be divided into training, validation and test
_MANY = 40  # fewer files are divided by their lengths, more by checksums of their names
_KINDS = ["parquet", "arrow", "json", "csv", "tsv", "text"]


class Texts(Protocol):
    """An iterable of texts that can be tokenized."""

    def __iter__(self) -> Iterator[str]: ...

    def tokens(self, encode: Encode, *, made_by: Any, what: str, ended: bool = True) -> Ragged:
        """Return the tokens of each text.

        Args:
            encode: returns the tokens of a text.
            made_by: cache key of the tokenizer.
            what: label of the progress bar.
            ended: whether ``encode`` adds a token at the end of each text.
        """

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the content; None if it is unknown."""


class InMemory:
    """Documents in memory, with a content key of their files."""

    def __init__(self, documents: list[Document], content: dict[str, Any] | None = None) -> None:
        self.documents = documents
        self.content = content

    def __iter__(self) -> Iterator[str]:
        return (document.text for document in self.documents)

    def where(self, index: int) -> str:
        """Return the name of a document."""
        return self.documents[index].name

    def tokens(self, encode: Encode, *, made_by: Any, what: str, ended: bool = True) -> Ragged:
        def tokens_of(document: Document) -> NDArray[np.int32]:
            tokens = encode(document.text)
            # The last token ends the text, which may continue elsewhere.
            return tokens if document.ends or not ended else tokens[:-1]

        total = len(self.documents)
        numbers = tracked(range(total), what, total=total)
        encoded, invalid, remarks, _ = make_shard(self.documents, tokens_of, numbers)
        if invalid:
            raise ValueError(invalid[0][1])
        joined = np.concatenate(encoded) if encoded else np.zeros(0, dtype=np.int32)
        ends = np.cumsum([len(tokens) for tokens in encoded], dtype=np.int64)
        return Ragged(joined, ends, notes=remark_lines(remarks, total, self))

    def fingerprint(self) -> dict[str, Any] | None:
        return self.content


class InRows:
    """A text column of rows; its tokens are cached and memory-mapped."""

    def __init__(self, rows: Any, column: str) -> None:
        self.rows = rows
        self.column = column

    def __iter__(self) -> Iterator[str]:
        for array in self.rows.values(self.column):
            yield from array.to_pylist()

    def tokens(self, encode: Encode, *, made_by: Any, what: str, ended: bool = True) -> Ragged:
        return ragged(self.rows, partial(_tokens, encode, self.column), made_by=made_by, what=what)

    def fingerprint(self) -> dict[str, Any]:
        return {**self.rows.fingerprint(), "text": self.column}

    def cache_key(self) -> dict[str, Any]:
        return {**rows_content(self.rows), "text": self.column}


def texts_of(source: Source, *, share: float, window: int) -> dict[str, Texts]:
    """Return the texts of a source by split.

    Args:
        source: an unopened source.
        share: share of the texts for each missing split.
        window: megabytes of parquet rows in memory.

    Raises:
        ValueError: the source cannot be used.
    """
    checked(share, window)
    where = source.where
    column = source.columns["column"]
    if where == "stdlib":
        check_split_by(where, {"": None}, source.split_by)
        return {name: InMemory(split) for name, split in held_out(stdlib()).items()}

    # A column of a table, or many text files: the tokens are memory-mapped.
    files_found = _few_files(where)
    if files_found is None:
        check = partial(check_texts, key="column")
        opened(source, held_out=share, window=window, kinds=_KINDS, check=check)
        return {name: InRows(rows, column) for name, rows in source.parts.items()}

    # Few text files: keep them in memory. One or two must be cut for a validation split.
    source.notes += files_found.notes
    splits = {
        split: documents(files, files_found.root) for split, files in files_found.parts.items()
    }
    check_split_by(where, splits, source.split_by)
    content = content_of(files_found.files, files_found.root)
    training = "train" if "train" in splits else ""
    if "validation" in splits:
        divided_splits = splits
    else:
        number = len(splits[training])
        if number < _FEW:
            divided_splits = _cut(splits, share)
            source.notes.append(
                f"{where}: the end of each file is held out, because {number} cannot be divided; "
                "see task.held_out"
            )
        elif number < _MANY:
            divided_splits = _by_size(splits, share)
            source.notes.append(f"{where}: {_shares(divided_splits)}")
        else:
            divided_splits = divided(splits, percent=100 * share)
    return {
        name: InMemory(split, {**content, "part": name, "share": share})
        for name, split in divided_splits.items()
    }


def _by_size(parts: dict[str, list[Document]], share: float) -> dict[str, list[Document]]:
    """Return splits of whole documents that hold out about this share of the characters.

    A checksum of the name orders the documents. Each missing split takes those that fit into its
    share, or the shortest one.

    Args:
        parts: documents by split, without validation; three or more for training.
        share: share of the characters for each of validation and test. If only a test split exists,
            validation gets both shares.
    """
    training = "train" if "train" in parts else ""
    left = sorted(parts[training], key=_checksum)
    total = sum(len(document.text) for document in left)
    made = {split: list[Document]() for split in ("train", "validation", "test")}
    shares = {"validation": 2 * share} if "test" in parts else dict.fromkeys(_HELD_OUT, share)
    for number, (split, part) in enumerate(shares.items()):
        room = part * total
        most = len(left) - (len(shares) - number)  # leave one for each later split, and for train
        for document in left:
            if len(document.text) <= room and len(made[split]) < most:
                made[split].append(document)
                room -= len(document.text)
        if not made[split]:
            made[split].append(min(left, key=lambda document: len(document.text)))
        left = [document for document in left if document not in made[split]]
    made["train"] = [document for document in parts[training] if document in left]
    return {**made, **{split: part for split, part in parts.items() if split == "test"}}


def _shares(splits: dict[str, list[Document]]) -> str:
    """Return number and share of the documents of each split, for the log."""
    sizes = {name: sum(len(one.text) for one in split) for name, split in splits.items()}
    total = max(1, sum(sizes.values()))
    lines = [
        f"{name} {len(split)} files ({sizes[name] / total:.0%} of the characters)"
        for name, split in splits.items()
    ]
    return ", ".join(lines).replace("%", " %")


def _cut(parts: dict[str, list[Document]], share: float) -> dict[str, list[Document]]:
    """Return splits of which validation and test are the ends of the training texts.

    Args:
        parts: documents by split, without validation.
        share: share of each text for each missing split. If only a test split exists, validation
            gets both shares.

    Raises:
        ValueError: all texts are too short.
    """
    training = "train" if "train" in parts else ""
    made: dict[str, list[Document]] = {"train": [], "validation": [], **parts}
    made.pop("", None)
    made["train"] = []
    made.setdefault("test", [])
    for document in parts[training]:
        text = document.text
        first = _break(text, round(len(text) * (1 - 2 * share)), share)
        second = len(text)
        if "test" not in parts:
            second = _break(text, round(len(text) * (1 - share)), share)
        has_test = second < len(text)
        is_cut = 0 < first < second and has_test == ("test" not in parts)
        if not is_cut:
            made["train"].append(document)  # it is too short
            continue
        made["train"].append(Document(document.name, text[:first], ends=False))
        held = Document(document.name, text[first:second], ends=second == len(text))
        made["validation"].append(held)
        if second < len(text):
            made["test"].append(Document(document.name, text[second:]))
    if not made["validation"]:
        raise ValueError(
            f"task.data: {parts[training][0].name} is too short to hold out its end; give files "
            "for training and validation"
        )
    return made


def _break(text: str, at: int, share: float) -> int:
    """Return an index near ``at`` to cut a text: after a line, else after a word."""
    end = at + max(1, round(len(text) * share / 2))
    for separator in ("\n", " "):
        found = text.find(separator, max(0, at - 1), end)
        if found >= 0:
            return found + 1
    return at


def all_texts(source: Source, *, window: int) -> Texts:
    """Return all texts of an unopened source, in file order; ``window`` is in megabytes.

    Raise ValueError if the source cannot be used.
    """
    if source.where == "stdlib":
        return InMemory(stdlib())
    # The same cases as in ``texts_of``.
    files_found = _few_files(source.where, whole=True)
    if files_found is None:
        check_texts([whole(source, window=window, kinds=_KINDS)], "column")
        return InRows(source.parts["all"], source.columns["column"])
    return InMemory(
        documents(files_found.files, files_found.root),
        content_of(files_found.files, files_found.root),
    )


def _large(files_found: Found[Path]) -> bool:
    """Return whether text files are too large to keep in memory."""
    training = files_found.parts.get("train") or files_found.parts.get("") or []
    is_cut = "validation" not in files_found.parts and len(training) < _FEW
    limit = _CUT if is_cut else _IN_MEMORY
    return sum(file.stat().st_size for file in files_found.files) > limit


def _few_files(where: str, *, whole: bool = False) -> Found[Path] | None:
    """Return text files that fit into memory; None if there are many, or rows of tables."""
    if where.startswith("hf:"):
        return None
    try:
        files = found(where, _KINDS, whole=whole)
    except ValueError as error:
        raise ValueError(f"task.data: {error}") from error
    return files if files.kind == "text" and not _large(files) else None


def _tokens(encode: Encode, column: str, row: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return the tokens of a row's text."""
    return encode(row[column])
