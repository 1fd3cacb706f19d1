"""The accelerate config files that oneloop brings along, by short names: single, ddp, fsdp2, …"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "accelerate_configs", _PACKAGE.parents[1] / "accelerate_configs")
"""of an installed package, and of a checkout"""


def config_files() -> dict[str, Path]:
    """All of them by name."""
    place = next(place for place in _PLACES if place.is_dir())
    return {path.stem: path for path in sorted(place.glob("*.yaml"))}


def config_file(asked: str) -> str:
    """The path that a short name stands for; a file of one's own comes first."""
    found = None if Path(asked).is_file() else config_files().get(asked)
    return str(found) if found else asked
