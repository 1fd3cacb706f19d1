"""Messages and tools that are written as JSON text."""

import json
from typing import Any


def read(text: str) -> list[Any] | None:
    """Return the list of objects in a JSON text; None if the text is anything else."""
    if not text.lstrip().startswith("["):
        return None
    try:
        entries: list[Any] = json.loads(text)
    except ValueError:
        return None
    if entries and all(isinstance(entry, dict) for entry in entries):
        return entries
    return None
