"""Which files a place holds, of which kind, and to which part of the data each belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    ".tsv": "csv",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), "image"),
}
"""what the files of a name's ending are"""
KINDS_OF_ROWS = ("parquet", "arrow", "json", "csv", "image")
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


def found(where: str | Path, kinds: Iterable[str] = KINDS_OF_ROWS) -> Found:
    """What lies at a path: a file, or a folder with files of one kind.

    Args:
        where: the path.
        kinds: what is looked for.

    Raises:
        ValueError: nothing there, files of several kinds, or parts of which only some are named.
    """
    root, wanted = Path(where).expanduser(), set(kinds)
    there = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    files = [file for file in there if KINDS.get(file.suffix.lower()) in wanted and not _hidden(file, root)]
    endings = ", ".join(ending for ending, kind in KINDS.items() if kind in wanted)
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
    return Found(root, kind, parted(chosen, root))


def parted(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Files by the part that their names tell: ``train-00001.jsonl``, ``valid/a.txt``; all under ``""`` where none is.

    Raises:
        ValueError: only some are named, or nothing is to be trained on.
    """
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault("" if file == root else part_of(file.relative_to(root)), []).append(file)
    code = all(file.suffix == ".py" for several in parts.values() for file in several)
    loose = any(file.parent == root for file in parts.get("validation", []))
    if code or ("train" not in parts and not loose):  # a folder of code or of pages may have a test/ or a dev/ too
        return {"": sorted(file for several in parts.values() for file in several)}
    if "" in parts or "train" not in parts:
        strange = below(parts[""][0], root) if "" in parts else "nothing to train on"
        raise ValueError(
            f"{str(root)!r} has files of {', '.join(sorted(filter(None, parts)))}, and {strange} beside them; name what"
            " is trained on train.… or put it into a folder train/, or move the others away"
        )
    return parts


def part_of(place: Path) -> str:
    """The part of the data that a relative path tells, or nothing. (A train.py is code.)"""
    folder = place.parts[0].lower() if len(place.parts) > 1 else ""
    file = re.split(r"[-_.]", place.name)[0].lower() if len(place.parts) == 1 and place.suffix != ".py" else ""
    return PARTS.get(folder) or PARTS.get(file, "")


def _hidden(file: Path, root: Path) -> bool:
    return file != root and any(part.startswith(".") for part in file.relative_to(root).parts)


def _aside(file: Path) -> bool:
    return bool(_ASIDE.fullmatch(file.name))
