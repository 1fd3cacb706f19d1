"""Rows of image files: their classes by folder, or by metadata files next to them."""

import os
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneloop.tasks.rows.cache import below
from oneloop.tasks.rows.csv_json_lines import csv_columns, file_rows
from oneloop.tasks.rows.find_files import (
    Found,
    directly_in_splits,
    kind_of,
    metadata_in,
    parted,
    without_split,
)
from oneloop.tasks.rows.text_tables import Columns

IMAGE = "image"
LABEL = "label"
FILE = "file_name"
_SHOWN = 5  # values in a message

_Metadata = Mapping[Path, Mapping[str, Any]]
"""the columns in a metadata file by image, without its name"""


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
    metadata = {folder: _read(file, read) for folder, file in _metadata_files(there).items()}
    if metadata:
        rows = [{IMAGE: str(file), **_about(file, metadata)} for file in files]
    else:
        loose = loose_images(there) if LABEL in read else []
        if loose:
            shown = ", ".join(below(file, there.root) for file in loose[:_SHOWN])
            raise ValueError(
                f"{there.where}: images beside the class folders have no class ({len(loose):,} in "
                f"all): {shown}; move each into the folder of its class, or out of the data set"
            )
        names = {folder: its_class.name for folder, its_class in there.classes.items()}
        rows = [{IMAGE: str(file), LABEL: names.get(file.parent, "")} for file in files]

    columns = Columns()
    columns.add(next(iter(_metadata_files(there).values()), there.root), rows)
    table = pyarrow.Table.from_arrays(columns.arrays(rows), schema=columns.schema())
    return Dataset(table).cast_column(IMAGE, Image(decode=False))


def class_folders(there: Found[Path], known: Collection[str]) -> dict[Path, Path]:
    """Return the folder of the class, by folder of images; that of loose images is left out.

    It is the outermost folder in which the images of a split divide. The folder of the split, and
    folders that hold all its images, are passed through. If the folders at one depth are named
    like known classes, they are the classes: a split may have images of one class only.

    Args:
        there: the files. Images below a folder with a metadata file need no class folder.
        known: the classes of a trained model; of a training split, those are still unknown.
    """
    described = _metadata_files(there).keys()
    parts = _splits(there)
    splits: list[list[Path]] = []  # folders of images, those of the training split first
    for split in sorted(parts, key=lambda split: split != "train"):
        folders = sorted({file.parent for file in parts[split]})
        splits.append([one for one in folders if described.isdisjoint((one, *one.parents))])
    each = [folder for folders in splits for folder in folders]
    levels = _levels(each, _top(there), have_splits="" not in parts)

    # Without any folder, the class is the name of the data set's folder.
    if not any(levels.values()):
        return dict.fromkeys(levels, _top(there))

    classes: dict[Path, Path] = {}
    names = set(map(composed, known))
    deepest = max(map(len, levels.values()))
    for folders in splits:
        depth = _depth([levels[folder] for folder in folders], names, deepest)
        found = {one: levels[one][depth] for one in folders if len(levels[one]) > depth}
        classes |= found
        # The next splits have the classes of the training split.
        names = names or {composed(folder.name) for folder in found.values()}
        deepest = min(deepest, depth)
    return classes


def _top(there: Found[Path]) -> Path:
    return there.root if there.root.is_dir() else there.root.parent


def _above(folder: Path, top: Path) -> list[Path]:
    """Return a folder and those above it, the outermost first, below ``top``."""
    return [one for one in reversed((folder, *folder.parents)) if top in one.parents]


def _splits(there: Found[Path]) -> Mapping[str, Sequence[Path]]:
    """Return the images by split, also if they are read as one set."""
    try:
        return parted(there.files, there.root, there.kind)
    except ValueError:
        return there.parts  # only some images have a split


def _levels(folders: Sequence[Path], top: Path, *, have_splits: bool) -> dict[Path, Sequence[Path]]:
    """Return what may be a class folder, by folder of images: those above it but its split's."""
    flat = directly_in_splits(folders)
    levels: dict[Path, Sequence[Path]] = {}
    for folder in folders:
        above = _above(folder, top)
        levels[folder] = above
        if have_splits:
            levels[folder] = without_split(above, innermost=flat or len(above) == 1)
    return levels


def _depth(levels: Sequence[Sequence[Path]], known: Collection[str], deepest: int) -> int:
    """Return the depth of the class folders of a split, at most ``deepest`` for unknown classes."""
    names = [[composed(folder.name) for folder in above] for above in levels]
    same = [len(set(several)) == 1 for several in zip(*names, strict=False)]
    shared = [*same, False].index(False)  # number of folders that hold all images
    for depth in range(shared + 1):
        if all(len(above) > depth and above[depth] in known for above in names):
            return depth

    # If all images are in one folder, it is their class.
    depth = min(shared, deepest)
    if all(len(above) == depth for above in names):
        depth = max(depth - 1, 0)
    return depth


def composed(name: str) -> str:
    """Return the name of a class in the Unicode form that composes accents."""
    return unicodedata.normalize("NFC", name)


def loose_images(there: Found[Path]) -> list[Path]:
    """Return the images that have neither a class folder nor metadata."""
    described = _metadata_files(there).keys()
    loose = [file for file in there.files if file.parent not in there.classes]
    return [file for file in loose if described.isdisjoint(file.parents)]


def empty_classes(there: Found[Path]) -> list[Path]:
    """Return the classes of an image data set without images.

    These are the folders that hold neither data nor folders, apart from those of the splits and
    those inside of a class folder with images.
    """
    classes = {*there.classes.values()}
    empty = []
    for name, inside, names in os.walk(there.root, followlinks=True):
        # os.walk enters what is left in this list.
        inside[:] = [one for one in inside if not one.startswith(".")]
        folder = Path(name)
        if inside or any(kind_of(Path(file)) for file in names):
            continue
        above = {folder, *folder.parents}
        if folder != there.root and not directly_in_splits([folder]) and above.isdisjoint(classes):
            empty.append(folder)
    return sorted(empty)


def metadata_of(there: Found[Path]) -> list[Path]:
    """Return the metadata files of the images."""
    return sorted(_metadata_files(there).values())


def _metadata_files(there: Found[Path]) -> dict[Path, Path]:
    """Return the metadata file of each folder that has one, in the root or above an image."""
    if not there.root.is_dir():
        return {}
    folders = {there.root}
    for folder in {file.parent for file in there.files}:
        folders.update(_above(folder, there.root))
    found = {}
    for folder in sorted(folders):
        metadata = metadata_in(folder)
        if metadata is not None:
            found[folder] = metadata
    return found


def _read(file: Path, columns: Sequence[str]) -> _Metadata:
    """Read a metadata file. Raise ValueError if it is unreadable or contradicts itself.

    ``columns``: those that are read.
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
                f"{file} names {name} twice, with {_brief(images[image])} and "
                f"{_brief(others)}; keep one of the rows"
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
        if row.values is None:
            raise ValueError(f"{file}, line {row.line}: {row.why}")
        for column, why in row.bad.items():
            if column == FILE or column in columns:
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


def _about(file: Path, metadata: Mapping[Path, _Metadata]) -> Mapping[str, Any]:
    """Return the columns of an image from the nearest metadata file that lists it."""
    for folder in file.parents:
        if folder in metadata and file in metadata[folder]:
            return metadata[folder][file]
    raise ValueError(f"{file} is in no metadata file above it; add its row, or move it away")


def _brief(values: Mapping[str, Any]) -> str:
    """Return the first values of a row as text."""
    shown = [f"{name} {value!r}" for name, value in values.items()]
    return ", ".join(shown[:_SHOWN]) or "no other value"
