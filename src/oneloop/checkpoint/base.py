"""Where a checkpoint's frozen parameters lie: written once, to ``base/`` beside the checkpoints, which name it by its
checksum. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.checkpoint.headers import header
from oneloop.checkpoint.store import changed, problems_of_files, read_manifest

FILE = "frozen.safetensors"


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
    wrong = changed(folder, {FILE: entry}) or problems_of_files(folder)
    return [f"{folder.name}/{line}" for line in wrong]


def names_in(folder: Path) -> set[str]:
    """Names of the parameters in it."""
    return set(header(folder / FILE)) - {"__metadata__"}


def fresh(run: Path, checkpoints: Iterable[Path]) -> Path:
    """A folder for frozen parameters that none of these checkpoints names: ``base``, ``base-2``, …"""
    named = set()
    for checkpoint in checkpoints:
        with suppress(ValueError):  # a damaged one names none
            named.add((base_of(checkpoint) or (run,))[0].name)
    names = ["base", *(f"base-{number}" for number in range(2, len(named) + 3))]
    return run / next(name for name in names if name not in named)
