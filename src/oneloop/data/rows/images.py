"""Image files as rows: the file, and the name of its folder or what a metadata file says of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneloop.data.rows.found import METADATA, Found

IMAGE, LABEL, FILE = "image", "label", "file_name"


def image_rows(there: Found, part: str) -> Any:
    """Return the images as a ``datasets.Dataset`` of ``image`` and ``label``, the name of its folder.

    If a ``metadata.csv`` (.jsonl, .parquet) is next to them or in a folder above, its columns replace the label: each
    row has a relative ``file_name``, as in ``datasets``. Raises ValueError if a metadata file is unreadable or lacks an
    image.
    """
    from datasets import Dataset, Image

    files = there.parts[part]
    described = {folder: _described(file) for folder, file in _metadata_files(there).items()}
    if not described:
        made = Dataset.from_dict({IMAGE: list(map(str, files)), LABEL: [file.parent.name for file in files]})
    else:
        made = Dataset.from_list([{IMAGE: str(file), **_about(file, described)} for file in files])
    return made.cast_column(IMAGE, Image(decode=False))


def metadata_of(there: Found) -> list[Path]:
    """The files that say more of the images."""
    return sorted(_metadata_files(there).values())


def _metadata_files(there: Found) -> dict[Path, Path]:
    folders = {there.root, *(folder for file in there.files for folder in file.relative_to(there.root).parents)}
    places = sorted({there.root / folder for folder in folders} if there.root.is_dir() else ())
    return {folder: folder / name for folder in places for name in METADATA if (folder / name).is_file()}


def _described(metadata: Path) -> Mapping[Path, dict[str, Any]]:
    import pyarrow
    from pyarrow import csv, json, parquet

    read = {".csv": csv.read_csv, ".jsonl": json.read_json, ".parquet": parquet.read_table}[metadata.suffix]
    try:
        rows = read(metadata).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{metadata} cannot be read: {' '.join(str(error).split())}") from error
    if not rows or not isinstance(rows[0].get(FILE), str):
        raise ValueError(f"{metadata} has no text in a column {FILE!r}, which says which image a row is of")
    if IMAGE in rows[0]:
        raise ValueError(f"{metadata} has a column {IMAGE!r}, which is what the image itself is called; rename it")
    return {metadata.parent / str(row.pop(FILE)): row for row in rows}


def _about(file: Path, described: Mapping[Path, Mapping[Path, dict[str, Any]]]) -> dict[str, Any]:
    for folder in file.parents:
        if file in described.get(folder, {}):
            return described[folder][file]
    raise ValueError(f"{file} is in no metadata file above it; add its row, or move it away")
