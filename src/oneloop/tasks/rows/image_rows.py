"""Rows of image files: their classes by folder, or by metadata files next to them."""

import os
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneloop.tasks.rows.cache import below
from oneloop.tasks.rows.column_types import columns_of, reject_mixed
from oneloop.tasks.rows.csv_json_lines import csv_columns, file_rows
from oneloop.tasks.rows.find_files import (
    Found,
    kind_of,
    metadata_in,
    parted,
    split_of,
)
from oneloop.tasks.rows.objects import with_fields

IMAGE = "image"
LABEL = "label"
FILE = "file_name"
_SHOWN = 5  # files in a message


def image_rows(
    there: Found[Path],
    split: str,
    read: Sequence[str],
) -> Any:
    """Return the images of a split as a ``datasets.Dataset``.

    Its columns are ``image`` and ``label``, the name of the class folder. If a ``metadata.csv``
    (.jsonl, .parquet) is next to the images or in a folder above, its columns replace the label:
    each row has a relative ``file_name``, as in ``datasets``.

    Args:
        there: the files.
        split: name of the split.
        read: the columns that are read.

    Raises:
        ValueError: a metadata file is unreadable, lacks an image, or names one twice or one that
            is missing; or images are in no class folder.
    """
    import pyarrow
    from datasets import Dataset, Image

    files = there.parts[split]
    rows = list[Mapping[str, Any]]()
    listed = metadata_files(there)
    if listed:
        # The nearest metadata file is the last one.
        metadata: dict[Path, Mapping[str, Any]] = {}
        for metadata_file in listed:
            metadata |= _read(metadata_file, read)
        for file in files:
            if file not in metadata:
                raise ValueError(
                    f"{file} is in no metadata file above it; add its row, or move it away"
                )
            rows.append({IMAGE: str(file), **with_fields(metadata[file], read)})
    else:
        loose = loose_images(there) if LABEL in read else []
        if loose:
            shown = ", ".join(below(file, there.root) for file in loose[:_SHOWN])
            raise ValueError(
                f"{there.where}: images next to the class folders have no class ({len(loose):,} in "
                f"all): {shown}; move each into the folder of its class, or out of the data set"
            )
        for file in files:
            label = there.classes.get(file.parent, file.parent).name
            rows.append({IMAGE: str(file), LABEL: label})

    columns = columns_of(zip(rows, files, strict=True))
    reject_mixed(columns.mixed, read, there.where)
    table = pyarrow.Table.from_batches([columns.batch(rows)])
    return Dataset(table).cast_column(IMAGE, Image(decode=False))


def class_folders(there: Found[Path], known: Iterable[str]) -> dict[Path, Path]:
    """Return the folder of the class, by folder of images; that of loose images is left out.

    It is the outermost folder in which the images of a split divide. The folder of the split, and
    folders that hold all its images, are passed through. If the folders at one depth are named
    like known classes, they are the classes: a split may have images of one class only.

    Args:
        there: the files. With metadata, there are no class folders.
        known: the classes of a trained model; without them, those of the training split.
    """
    if there.root.is_file() or metadata_files(there):
        return {}
    try:
        # Also of images that are read as one set.
        splits = parted(there.files, there.root, there.kind, there.where)
    except ValueError:
        splits = there.parts

    classes: dict[Path, Path] = {}
    names = set(map(composed, known))
    for split in sorted(splits, key=lambda split: split != "train"):
        folders = {file.parent for file in splits[split]}
        paths = {folder: folder.relative_to(there.root).parts for folder in folders}
        depth = _depth([*paths.values()], split, names)
        for folder, path in paths.items():
            if len(path) > depth:
                classes[folder] = there.root.joinpath(*path[: depth + 1])
        names = names or {composed(folder.name) for folder in classes.values()}
    return classes


def _depth(paths: Sequence[Sequence[str]], split: str, known: set[str]) -> int:
    """Return the depth of the class folders of a split, by the paths of its folders."""
    levels = [set(map(composed, level)) for level in zip(*paths, strict=False)]
    for depth, names in enumerate(levels):
        if names <= known:
            return depth
    is_split = False  # whether all names are those of the split
    for depth, names in enumerate(levels):
        is_split = bool(split) and set(map(split_of, names)) == {split}
        if len(names) > 1 and not is_split:
            return depth
    depth = len(levels)
    # If all images are in one folder, it is that of their class or of their split.
    is_one = all(len(path) == depth for path in paths) and not is_split
    return max(depth - is_one, 0)


def composed(name: str) -> str:
    """Return the name of a class in the Unicode form that composes accents."""
    return unicodedata.normalize("NFC", name)


def loose_images(there: Found[Path]) -> list[Path]:
    """Return the images next to the class folders."""
    if not there.classes:
        return []
    return [file for file in there.files if file.parent not in there.classes]


def empty_classes(there: Found[Path]) -> list[Path]:
    """Return the classes of an image data set without images.

    These are the folders that hold neither data nor folders, apart from those of the splits and
    those inside of a class folder with images.
    """
    classes = {*there.classes.values()}
    empty = []
    for name, inside, names in os.walk(there.root if classes else "", followlinks=True):
        # os.walk enters what is left in this list.
        inside[:] = [one for one in inside if not one.startswith(".")]
        folder = Path(name)
        if inside or any(kind_of(Path(file)) for file in names):
            continue
        if not split_of(folder.name) and classes.isdisjoint((folder, *folder.parents)):
            empty.append(folder)
    return sorted(empty)


def metadata_files(there: Found[Path]) -> list[Path]:
    """Return the metadata files in the root and in the folders above an image, outer ones first."""
    if not there.root.is_dir():
        return []
    folders = {there.root}
    for file in there.files:
        folders.update(there.root / folder for folder in file.relative_to(there.root).parents)
    return [*filter(None, map(metadata_in, sorted(folders)))]


def _read(file: Path, columns: Sequence[str]) -> Mapping[Path, Mapping[str, Any]]:
    """Return the columns in a metadata file by image, without its name.

    Args:
        file: the file.
        columns: the columns that are read.

    Raises:
        ValueError: the file is unreadable or contradicts itself.
    """
    rows = _parquet(file) if file.suffix == ".parquet" else _text(file, columns)
    images: dict[Path, Mapping[str, Any]] = {}
    for number, row in enumerate(rows):
        name = row.get(FILE)
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{file} has no text in a column {FILE!r} of row {number}, which must name "
                "the image"
            )
        if IMAGE in row:
            raise ValueError(
                f"{file} has a column {IMAGE!r}, which is what the image itself is called; "
                "rename it"
            )
        others = {column: value for column, value in row.items() if column != FILE}
        image = file.parent / os.path.normpath(name)
        if image in images:
            raise ValueError(
                f"{file} names {name} twice, with {reprlib.repr(images[image])} and "
                f"{reprlib.repr(others)}; keep one of the rows"
            )
        if not image.is_file():
            raise ValueError(
                f"{file} names {name}, which does not exist; remove the row, or add the image"
            )
        images[image] = others
    return images


def _text(file: Path, columns: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the rows of a CSV or JSON Lines file. Raise ValueError if one cannot be read."""
    kind = "csv" if file.suffix == ".csv" else "json"
    if kind == "csv":
        csv_columns(file, kind)  # raises ValueError if the first line is wrong
    rows = list[Mapping[str, Any]]()
    for row in file_rows(file, kind):
        for column, why in row.bad.items():
            if column in (None, FILE, *columns):
                raise ValueError(f"{file}, line {row.line}: {why}")
        rows.append(row.values)
    return rows


def _parquet(file: Path) -> list[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    return rows
