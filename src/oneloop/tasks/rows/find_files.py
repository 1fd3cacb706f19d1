"""The files of a data set: find them at a path, with their split and class."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path, PurePath
from typing import Generic, TypeVar

from oneloop.tasks.rows.cache import below, cached_json, content_of, key_of
from oneloop.tasks.rows.csv_json_lines import COMPRESSED, quotes_of

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".jpx")
_IMAGES = (".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff", ".ppm", ".pgm", *_JPEG)
KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".txt", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys(_IMAGES, "image"),
}
"""kind of file by suffix"""
KINDS_OF_ROWS = ("parquet", "arrow", "json", "csv", "tsv", "image")
KINDS_OF_TEXTS = ("parquet", "arrow", "json", "csv", "tsv", "text")
SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
}
"""split by the words in names of files, folders and hub splits"""
# Between letters and others, before a capital (myTrain), and before the last of several (XMLTrain).
_BORDER = r"(?:\b|(?<=[\W\d_])|(?=[\W\d_])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))"
_WORD = re.compile(
    f"{_BORDER}(?i:({'|'.join(SPLITS)})"
    f"|(train|validation|valid|dev|test)(?:set|data|file|split)){_BORDER}"
)
_HELD_OUT = re.compile("test|valid|dev", re.I)
# next to images: their labels and other columns
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_COMPRESSED = (*COMPRESSED, ".xz", ".zip")
_DECOMPRESSED = ("json", "csv", "tsv")  # kinds of files that may be compressed
_AUXILIARY = re.compile(
    r"(readme|licen[sc]e|copying|changelog|dataset_info|state|dataset_dict|metadata)\b.*", re.I
)
"""files next to the data that are not data"""


AnyPath = TypeVar("AnyPath", bound=PurePath)  # on a disk, or a name in a store


@dataclass(frozen=True)
class Found(Generic[AnyPath]):
    """Files of one kind, by split; all under ``""`` if no name contains a split."""

    root: AnyPath
    kind: str
    parts: dict[str, list[AnyPath]]
    notes: list[str] = field(default_factory=list)  # for the log
    where: str = ""  # path or address, for messages
    # of images without metadata: the folder of the class, by folder of the image
    classes: Mapping[AnyPath, AnyPath] = field(default_factory=dict)

    @property
    def regrouped(self) -> dict[str, str]:
        """Return the name of the class, by folder of images that has another name."""
        pairs = self.classes.items()
        return {below(one, self.root): its.name for one, its in pairs if one.name != its.name}

    @property
    def files(self) -> list[AnyPath]:
        """Return the files of all splits, sorted."""
        return sorted(file for split in self.parts.values() for file in split)


def found(
    where: str | Path, kinds: Iterable[str] = KINDS_OF_ROWS, *, whole: bool = False
) -> Found[Path]:
    """Return the files of one kind at a path, by split; follow links.

    Args:
        where: a file or a folder, or its ``file:///`` address.
        kinds: the kinds to look for.
        whole: return the files as one set.

    Raises:
        ValueError: files are missing, unreadable or of several kinds, or only some belong to a
            split.
    """
    if str(where).startswith("file:") and not str(where).startswith("file:///"):
        raise ValueError("file:// needs a path: file:///FOLDER")
    root = Path(str(where).removeprefix("file://")).expanduser()
    if not root.exists():
        raise ValueError(f"{str(where)!r} is not a file or folder; give the path of the data")
    there = [root] if root.is_file() else sorted(_files(root))
    made = chosen(there, root, kinds, whole=whole)
    if made.kind != "tsv":
        return made
    key = key_of(content_of(made.files, root))
    kind, line = cached_json(f"quotes/{key}.json", lambda: quotes_of(made.files))
    if line:
        made.notes.append(f"{root}: {line}")
    return replace(made, kind=kind)


def chosen(
    there: Sequence[AnyPath],
    root: AnyPath,
    kinds: Iterable[str],
    *,
    whole: bool,
    where: str = "",
) -> Found[AnyPath]:
    """Return the files of one kind by split, by their names.

    Args:
        there: all files.
        root: the folder of the data set, or its only file.
        kinds: the kinds to look for.
        whole: return the files as one set.
        where: address for messages, if the files are not on a disk.

    Raises:
        ValueError: files are missing or of several kinds, or only some belong to a split.
    """
    wanted = set(kinds)
    where = where or str(root)
    names = set(there)
    for file in there:
        if file.suffix.lower() in COMPRESSED and file.with_suffix("") in names:
            raise ValueError(
                f"{file} is there twice, compressed and as {file.stem}; move one of them away"
            )
        inner = KINDS.get(Path(file.stem).suffix.lower())
        unread = inner and kind_of(file) is None
        if file.suffix.lower() in _COMPRESSED and (unread or file.stem in METADATA):
            raise ValueError(
                f"{file} is compressed, which is not supported; decompress it or move it away"
            )

    # Group the files by kind.
    by_kind: dict[str, list[AnyPath]] = {}
    others = Counter[str]()
    for file in there:
        kind = kind_of(file)
        if kind in wanted:
            by_kind.setdefault(kind, []).append(file)
        elif not _AUXILIARY.fullmatch(file.name):
            others[file.suffix.lower() or "without an ending"] += 1
    if not by_kind:
        endings = ", ".join(ending for ending, kind in KINDS.items() if kind in wanted)
        raise ValueError(f"{where!r} holds no data; give a file, or a folder of {endings} files")

    # Drop what is not data, such as a README: metadata.csv belongs to an image folder.
    if len(by_kind) > 1:
        for kind in [*by_kind]:
            by_kind[kind] = [file for file in by_kind[kind] if not _AUXILIARY.fullmatch(file.name)]
        by_kind = {kind: files for kind, files in by_kind.items() if files}
    if len(by_kind) > 1:
        described = [f"{len(files)} of {kind} ({files[0].name})" for kind, files in by_kind.items()]
        raise ValueError(
            f"{where!r} holds files of several kinds: {' and '.join(described)}; keep one "
            "kind, or move the others away"
        )

    ((kind, files),) = by_kind.items()
    if kind == "arrow":
        # datasets stores results of map and filter next to its data.
        files = [file for file in files if file == root or not file.name.startswith("cache-")]
    notes = []
    if others:
        kinds = ", ".join(f"{count:,} {ending}" for ending, count in sorted(others.items()))
        notes.append(f"{where}: files that are not read: {kinds}")
    parts = {"": sorted(files)}
    if not whole and files != [root]:
        parts = parted(files, root, kind, where)
    return Found(root, kind, parts, notes, where)


def kind_of(file: PurePath) -> str | None:
    """Return the kind of a file by its ending; None if it is unknown."""
    suffix = file.suffix.lower()
    if suffix not in COMPRESSED:
        return KINDS.get(suffix)
    inner = KINDS.get(Path(file.stem).suffix.lower())
    return inner if inner in _DECOMPRESSED else None


def _files(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, without hidden ones."""
    seen = set()
    for folder, inside, names in os.walk(root, followlinks=True, onerror=_reject):
        real = os.path.realpath(folder)
        if real in seen:
            raise ValueError(
                f"{folder} links to {real}, which has already been read; remove the link"
            )
        seen.add(real)

        # os.walk enters what is left in this list.
        inside[:] = [name for name in inside if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            file = Path(folder, name)
            if not file.exists():
                raise ValueError(f"{file} is a broken link; remove it")
            yield file


def _reject(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}")


def split_of(name: str, *, first: bool = False) -> str:
    """Return the split that a name contains as a word; empty if it contains none.

    Digits, other characters and a capital separate words, as in train1, test_2020 and TestData;
    also trainset, testdata, devfile. A name with train and another split, train_test, is empty.

    Args:
        name: of a file, a folder, or a split of the hub.
        first: whether the word must be the first one.
    """
    words = [word for word in _WORD.finditer(name) if not first or not word.start()]
    splits = [SPLITS[(word[1] or word[2]).lower()] for word in words]
    if not splits or ("train" in splits and len(set(splits)) > 1):
        return ""
    return splits[0]


def parted(
    files: Sequence[AnyPath], root: AnyPath, kind: str, where: str
) -> dict[str, list[AnyPath]]:
    """Group files by the split in their names (``train-00001.jsonl``, ``valid/a.txt``).

    All are under ``""`` if none has a split.

    Args:
        files: the files.
        root: the folder of the data set, or its only file.
        kind: their kind.
        where: path or address for messages.

    Raises:
        ValueError: only some files have a split, or none is for training, or the names of two files
            seem to be different splits.
    """
    parts: dict[str, list[AnyPath]] = {}
    words = list[tuple[AnyPath, str]]()  # each file and name that may contain a split
    for file, folders, names in _names(files, root, kind):
        # A folder with exactly the name of a split decides first.
        exact = [SPLITS.get(folder.lower(), "") for folder in folders]
        splits = [*exact, *(split_of(name, first=kind == "text") for name in names)]
        parts.setdefault(next(filter(None, splits), ""), []).append(file)
        words += [(file, name) for name in names]

    # Code often has the names of splits, too.
    is_code = [file.suffix == ".py" for file in files]
    in_root = any(file.parent == root for file in parts.get("validation", []))
    are_splits = kind != "text" or (not all(is_code) and ("train" in parts or in_root))
    if set(parts) == {""} or not are_splits:
        if not any(is_code):
            _reject_unlike(words, where)
        return {"": sorted(files)}
    there = ", ".join(sorted(filter(None, parts)))
    if "" in parts:
        raise ValueError(
            f"{where!r} has files of {there}, but {below(parts[''][0], root)} belongs to no split; "
            "name the training data train.…, or put it into a folder train/, or move the others "
            "away"
        )
    if "train" not in parts:
        raise ValueError(
            f"{where!r} has files of {there}, but no training data; name the training data "
            "train.…, or put it into a folder train/, or move the others away"
        )
    return parts


def _names(
    files: Sequence[AnyPath], root: AnyPath, kind: str
) -> Iterator[tuple[AnyPath, Sequence[str], list[str]]]:
    """Yield each file, the folders that may be splits, and the names that may contain them.

    - Rows: the file (``train-00000-of-00002.parquet``), and folders at any depth.
    - Images: the folders above the class folder. If there is none, images have metadata, or are
      directly in their split.
    - Text: the first folder, or the file. Deeper folders are ignored, because code has test/ and
      dev/ folders, too. train.py is code.

    The name of a folder that holds all files does not matter, unless it is exactly a split.
    """
    folders = {file.parent: file.parent.relative_to(root).parts for file in files}
    # If an image has a class folder in its split, an image without one is rejected later.
    flat = (
        all(split_of(folder.name) for folder in folders)
        or any(split_of(name) for path in folders.values() for name in path[:-1])
        or (kind == "image" and any(metadata_in(Path(folder)) for folder in folders))
    )
    shared = len(PurePath(os.path.commonpath(folders)).parts) - len(root.parts)
    for file in files:
        above = folders[file.parent]
        names = [file.name]
        if kind == "image":
            names = []
            above = above if flat else above[:-1]
        elif kind == "text":
            above = above[:1]
            names = [] if above or file.suffix == ".py" else names
        yield file, above, [*names, *above[shared:]]


def _reject_unlike(words: Sequence[tuple[AnyPath, str]], where: str) -> None:
    """Raise ValueError if the names of two files seem to be different splits.

    A name with both words, such as train_test_1, does not seem to be another split.

    Args:
        words: each file, and a name that may contain a split.
        where: path or address for messages.
    """
    training = list[tuple[AnyPath, str]]()
    held_out = list[tuple[AnyPath, str]]()
    for word in words:
        is_training = "train" in word[1].lower()
        if is_training != bool(_HELD_OUT.search(word[1])):
            (training if is_training else held_out).append(word)
    for (file, name), (other_file, other) in product(training, held_out):
        if file != other_file:
            raise ValueError(
                f"{where!r} has no names of splits, but {name!r} contains train, and {other!r} "
                "contains test, valid or dev; rename them train.… and test.… (validation.…), or "
                "remove these words from their names"
            )


def metadata_in(folder: Path) -> Path | None:
    """Return the metadata file of a folder. Raise ValueError if it has several."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder} has {found[0].name} and {found[1].name}; keep one of them")
    return found[0] if found else None
