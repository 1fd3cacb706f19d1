"""Which files a place holds, of which kind, and to which part of the data each belongs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oneloop.data.rows.cache import below

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), "image"),
}
"""what the files of a name's ending are"""
KINDS_OF_ROWS = ("parquet", "arrow", "json", "csv", "tsv", "image")
PARTS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
"""what files, folders and splits are called, and what they are"""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""beside images: what they are"""
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ASIDE = re.compile(
    r"(readme|licen[sc]e|copying|changelog|dataset_info|state|dataset_dict|metadata)\b.*", re.IGNORECASE
)
"""what lies beside data, and is none"""


@dataclass(frozen=True)
class Found:
    """Files of one kind, by part; all under ``""`` where no part is named."""

    root: Path
    kind: str
    parts: dict[str, list[Path]]

    @property
    def files(self) -> list[Path]:
        return sorted(file for part in self.parts.values() for file in part)


def found(where: str | Path, kinds: Iterable[str] = KINDS_OF_ROWS, *, whole: bool = False) -> Found:
    """Return the files of one of ``kinds`` at a path, by split (``whole``: as one). Links are followed. Raises
    ValueError for missing, mixed or unreadable files, and if only some belong to a split."""
    root, wanted = Path(where).expanduser(), set(kinds)
    there = [root] if root.is_file() else sorted(_files(root)) if root.exists() else []
    files = [file for file in there if KINDS.get(file.suffix.lower()) in wanted]
    endings = ", ".join(ending for ending, kind in KINDS.items() if kind in wanted)
    if packed := [file for file in there if file.suffix in _PACKED and Path(file.stem).suffix in KINDS]:
        raise ValueError(f"{packed[0]} is compressed, and is not read; unpack it, or move it away")
    if not files:
        why = "is no such file or folder" if not root.exists() else "holds no data"
        raise ValueError(f"{str(where)!r} {why}; give a file, or a folder of {endings} files")
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(KINDS[file.suffix.lower()], []).append(file)
    if len(by_kind) > 1:  # of an image folder metadata.csv is a part
        by_kind = {kind: kept for kind, some in by_kind.items() if (kept := [f for f in some if not _aside(f)])}
    if len(by_kind) > 1:
        some = " and ".join(f"{len(several)} of {kind} ({several[0].name})" for kind, several in by_kind.items())
        raise ValueError(f"{str(where)!r} holds files of several kinds: {some}; keep one kind, or move the others away")
    ((kind, chosen),) = by_kind.items()
    if kind == "arrow":  # beside what datasets saved lie results of its map and filter
        chosen = [file for file in chosen if file == root or not file.name.startswith("cache-")]
    return Found(root, kind, {"": sorted(chosen)} if whole else parted(chosen, root, kind))


def _files(root: Path) -> Iterator[Path]:
    seen = set()
    for folder, inside, names in os.walk(root, followlinks=True, onerror=_refuse):
        if (real := os.path.realpath(folder)) in seen:
            raise ValueError(f"{folder} links to {real}, which is read already; remove the link")
        seen.add(real)
        inside[:] = [name for name in inside if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                file = Path(folder, name)
                if not file.exists():
                    raise ValueError(f"{file} links to nothing; remove it")
                yield file


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}")


def parted(files: Iterable[Path], root: Path, kind: str) -> dict[str, list[Path]]:
    """Group files by the split in their names (``train-00001.jsonl``, ``valid/a.txt``); all under ``""`` if none has
    one. Raises ValueError if only some have one, or none is for training."""
    tell = {"text": _of_text, "image": _of_image}.get(kind, _of_rows)
    described = {folder for folder in {f.parent for f in files} if any((folder / name).is_file() for name in METADATA)}
    flat = kind == "image" and all(file == root or file.parent.name.lower() in PARTS for file in files)
    parts: dict[str, list[Path]] = {}
    for file in files:
        inside = file.parent in described or flat  # of images: no folder of a class
        part = "" if file == root else tell(file.relative_to(root), inside)
        parts.setdefault(part, []).append(file)
    loose = any(file.parent == root for file in parts.get("validation", []))
    if set(parts) == {""} or (kind == "text" and (_code(files) or ("train" not in parts and not loose))):
        return {"": sorted(file for several in parts.values() for file in several)}
    if "" in parts or "train" not in parts:
        strange = below(parts[""][0], root) if "" in parts else "nothing to train on"
        raise ValueError(
            f"{str(root)!r} has files of {', '.join(sorted(filter(None, parts)))}, and {strange} beside them; name what"
            " is trained on train.… or put it into a folder train/, or move the others away"
        )
    return parts


def _code(files: Iterable[Path]) -> bool:
    return all(file.suffix == ".py" for file in files)


def _of_rows(place: Path, inside: bool) -> str:
    """By a folder at any depth, or a word of the file's name: ``data/train-00000-of-00002``, ``reviews_test``."""
    words = [*place.parts[:-1], *re.split(r"[-_. ]", place.name)]
    return next((PARTS[word.lower()] for word in words if word.lower() in PARTS), "")


def _of_image(place: Path, inside: bool) -> str:
    """By a folder above that of the class."""
    folders = place.parts[:-1] if inside else place.parts[:-2]
    return next((PARTS[folder.lower()] for folder in folders if folder.lower() in PARTS), "")


def _of_text(place: Path, inside: bool) -> str:
    """By the first folder, or how the file's name begins. (A folder of code or of pages may have a test/ or a dev/ too,
    and a train.py is code.)"""
    folder = place.parts[0].lower() if len(place.parts) > 1 else ""
    file = re.split(r"[-_.]", place.name)[0].lower() if len(place.parts) == 1 and place.suffix != ".py" else ""
    return PARTS.get(folder) or PARTS.get(file, "")


def _aside(file: Path) -> bool:
    return bool(_ASIDE.fullmatch(file.name))
