"""Where a checkpoint's frozen parameters lie: written once, to ``base/`` beside the checkpoints, which name it by its
checksum; or only named there, where they are somebody else's. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.checkpoint.headers import header
from oneloop.checkpoint.store import changed, problems_of_files, read_manifest

FILE = "frozen.safetensors"
NAMED = "origin.json"
"""in its place: what they were read from, and their names"""


def base_of(checkpoint: Path) -> tuple[Path, dict[str, Any]] | None:
    """The folder with a checkpoint's frozen parameters, and what its file should be; None where none are frozen."""
    entry = read_manifest(checkpoint)["about"].get("base")
    if not entry:
        return None
    return checkpoint.parent.parent / Path(entry["folder"]).name, entry


def base_problems(checkpoint: Path) -> list[str]:
    """What is wrong with the frozen parameters of a checkpoint, which is good itself. Reads them whole."""
    told = base_of(checkpoint)
    if told is None:
        return []
    folder, entry = told
    wrong = changed(folder, {file_of(entry): entry}) or problems_of_files(folder)
    return [f"{folder.name}/{line}" for line in wrong]


def file_of(entry: Mapping[str, Any]) -> str:
    """The file's name, of what a manifest says of frozen parameters."""
    return NAMED if entry.get("file") == NAMED else FILE


def origin_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint's frozen parameters were read from (``place`` with ``files`` or ``commit``) and their
    ``names``; None where it is not only named."""
    told = base_of(checkpoint)
    if told is None or file_of(told[1]) != NAMED:
        return None
    return dict(json.loads((told[0] / NAMED).read_text()))


def names_in(folder: Path) -> set[str]:
    """Names of the parameters in it."""
    if not (folder / FILE).exists():
        return {f"model.{name}" for name in json.loads((folder / NAMED).read_text())["names"]}
    return set(header(folder / FILE)) - {"__metadata__"}


def fresh(run: Path, checkpoints: Iterable[Path]) -> Path:
    """A folder for frozen parameters that none of these checkpoints names: ``base``, ``base-2``, …"""
    named = set()
    for checkpoint in checkpoints:
        with suppress(ValueError):  # a damaged one names none
            named.add((base_of(checkpoint) or (run,))[0].name)
    names = ["base", *(f"base-{number}" for number in range(2, len(named) + 3))]
    return run / next(name for name in names if name not in named)
