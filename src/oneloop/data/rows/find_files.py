"""The files of a data set: find them at a path, with their split and class."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneloop.data.rows.cache import below

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv"}
KINDS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json") | dict.fromkeys(
    (".txt", ".md", ".rst", ".py"), "text"
)
KINDS |= dict.fromkeys(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), "image"
)
"""kind of file by suffix"""
KINDS_OF_ROWS = ("parquet", "arrow", "json", "csv", "tsv", "image")
SPLITS = {"train": "train", "training": "train", "test": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation")
"""split by the names of files, folders and hub splits"""
# next to images: their labels and other columns
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_AUXILIARY = re.compile(
    r"(readme|licen[sc]e|copying|changelog|dataset_info|state|dataset_dict|metadata)\b.*", re.I
)
"""files next to the data that are not data"""


@dataclass(frozen=True)
class Found:
    """Files of one kind, by split; all under ``""`` if no name contains a split."""

    root: Path
    kind: str
    parts: dict[str, list[Path]]

    @property
    def files(self) -> list[Path]:
        return sorted(file for split in self.parts.values() for file in split)


def found(where: str | Path, kinds: Iterable[str] = KINDS_OF_ROWS, *, whole: bool = False) -> Found:
    """Return the files of one of ``kinds`` at a path, by split (``whole``: as one set); follow
    links. Raises ValueError for missing, mixed or unreadable files, and if only some belong to a
    split."""
    root, wanted = Path(where).expanduser(), set(kinds)
    there = [root] if root.is_file() else sorted(_files(root)) if root.exists() else []
    files = [file for file in there if KINDS.get(file.suffix.lower()) in wanted]
    endings = ", ".join(ending for ending, kind in KINDS.items() if kind in wanted)
    if packed := [
        file for file in there if file.suffix in _COMPRESSED and Path(file.stem).suffix in KINDS
    ]:
        raise ValueError(
            f"{packed[0]} is compressed, which is not supported; decompress it or move it away"
        )
    if not files:
        why = "is not a file or folder" if not root.exists() else "holds no data"
        raise ValueError(f"{str(where)!r} {why}; give a file, or a folder of {endings} files")
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(KINDS[file.suffix.lower()], []).append(file)
    if len(by_kind) > 1:  # metadata.csv belongs to an image folder
        by_kind = {
            kind: kept
            for kind, some in by_kind.items()
            if (kept := [f for f in some if not _AUXILIARY.fullmatch(f.name)])
        }
    if len(by_kind) > 1:
        some = " and ".join(
            f"{len(several)} of {kind} ({several[0].name})" for kind, several in by_kind.items()
        )
        raise ValueError(
            f"{str(where)!r} holds files of several kinds: {some}; keep one kind, or move the "
            "others away"
        )
    ((kind, chosen),) = by_kind.items()
    if kind == "arrow":  # datasets stores results of map and filter next to its data
        chosen = [file for file in chosen if file == root or not file.name.startswith("cache-")]
    return Found(root, kind, {"": sorted(chosen)} if whole else parted(chosen, root, kind))


def _files(root: Path) -> Iterator[Path]:
    seen = set()
    for folder, inside, names in os.walk(root, followlinks=True, onerror=_reject):
        if (real := os.path.realpath(folder)) in seen:
            raise ValueError(
                f"{folder} links to {real}, which has already been read; remove the link"
            )
        seen.add(real)
        inside[:] = [name for name in inside if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                file = Path(folder, name)
                if not file.exists():
                    raise ValueError(f"{file} is a broken link; remove it")
                yield file


def _reject(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}")


def parted(files: Iterable[Path], root: Path, kind: str) -> dict[str, list[Path]]:
    """Group files by the split in their names (``train-00001.jsonl``, ``valid/a.txt``); all under
    ``""`` if none has one. Raises ValueError if only some have one, or none is for training."""
    split_of = {"text": _of_text, "image": _of_image}.get(kind, _of_rows)
    described = {
        folder
        for folder in {f.parent for f in files}
        if any((folder / name).is_file() for name in METADATA)
    }
    flat = kind == "image" and all(
        file == root or file.parent.name.lower() in SPLITS for file in files
    )
    parts: dict[str, list[Path]] = {}
    for file in files:
        inside = file.parent in described or flat  # images without a folder per class
        split = "" if file == root else split_of(file.relative_to(root), inside)
        parts.setdefault(split, []).append(file)
    validation_file = any(file.parent == root for file in parts.get("validation", []))
    if set(parts) == {""} or (
        kind == "text"
        and (
            all(file.suffix == ".py" for file in files)
            or ("train" not in parts and not validation_file)
        )
    ):
        return {"": sorted(file for several in parts.values() for file in several)}
    if "" in parts or "train" not in parts:
        conflict = (
            f"{below(parts[''][0], root)} belongs to no split"
            if "" in parts
            else "no training data"
        )
        there = ", ".join(sorted(filter(None, parts)))
        advice = (
            "name the training data train.…, or put it into a folder train/, or move the others "
            "away"
        )
        raise ValueError(f"{str(root)!r} has files of {there}, but {conflict}; {advice}")
    return parts


def _of_rows(path: Path, inside: bool) -> str:
    """Return the split by a folder at any depth or a word of the file name
    (``train-00000-of-00002``)."""
    words = [*path.parts[:-1], *re.split(r"[-_. ]", path.name)]
    return next((SPLITS[word.lower()] for word in words if word.lower() in SPLITS), "")


def _of_image(path: Path, inside: bool) -> str:
    """Return the split by a folder above the class folder."""
    folders = path.parts[:-1] if inside else path.parts[:-2]
    return next((SPLITS[folder.lower()] for folder in folders if folder.lower() in SPLITS), "")


def _of_text(path: Path, inside: bool) -> str:
    """Return the split by the first folder or the first word of the file name. Deeper folders are
    ignored, because code has test/ and dev/ folders, too. train.py is code."""
    folder = path.parts[0].lower() if len(path.parts) > 1 else ""
    file = (
        re.split(r"[-_.]", path.name)[0].lower()
        if len(path.parts) == 1 and path.suffix != ".py"
        else ""
    )
    return SPLITS.get(folder) or SPLITS.get(file, "")


IMAGE, LABEL, FILE = "image", "label", "file_name"


def image_rows(there: Found, split: str) -> Any:
    """Return the images as a ``datasets.Dataset`` of ``image`` and ``label``, the name of its
    folder.

    If a ``metadata.csv`` (.jsonl, .parquet) is next to them or in a folder above, its columns
    replace the label: each row has a relative ``file_name``, as in ``datasets``. Raises ValueError
    if a metadata file is unreadable or lacks an image."""
    from datasets import Dataset, Image

    files = there.parts[split]
    described = {folder: _described(file) for folder, file in _metadata_files(there).items()}
    if not described:
        made = Dataset.from_dict(
            {IMAGE: list(map(str, files)), LABEL: [file.parent.name for file in files]}
        )
    else:
        made = Dataset.from_list([{IMAGE: str(file), **_about(file, described)} for file in files])
    return made.cast_column(IMAGE, Image(decode=False))


def metadata_of(there: Found) -> list[Path]:
    """Return the metadata files of the images."""
    return sorted(_metadata_files(there).values())


def _metadata_files(there: Found) -> dict[Path, Path]:
    folders = {
        there.root,
        *(folder for file in there.files for folder in file.relative_to(there.root).parents),
    }
    candidates = sorted({there.root / folder for folder in folders} if there.root.is_dir() else ())
    return {
        folder: folder / name
        for folder in candidates
        for name in METADATA
        if (folder / name).is_file()
    }


def _described(metadata: Path) -> Mapping[Path, dict[str, Any]]:
    import pyarrow
    from pyarrow import csv, json, parquet

    read = {".csv": csv.read_csv, ".jsonl": json.read_json, ".parquet": parquet.read_table}[
        metadata.suffix
    ]
    try:
        rows = read(metadata).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{metadata} cannot be read: {' '.join(str(error).split())}") from error
    if not rows or not isinstance(rows[0].get(FILE), str):
        raise ValueError(
            f"{metadata} has no text in a column {FILE!r}, which must name the image of each row"
        )
    if IMAGE in rows[0]:
        raise ValueError(
            f"{metadata} has a column {IMAGE!r}, which is what the image itself is called; "
            "rename it"
        )
    return {metadata.parent / str(row.pop(FILE)): row for row in rows}


def _about(file: Path, described: Mapping[Path, Mapping[Path, dict[str, Any]]]) -> dict[str, Any]:
    for folder in file.parents:
        if file in described.get(folder, {}):
            return described[folder][file]
    raise ValueError(f"{file} is in no metadata file above it; add its row, or move it away")
