"""What a user asks ``oneloop check`` to read."""

from pathlib import Path


def is_recipe(source: str) -> bool:
    """Return whether ``source`` is a recipe or a task, not a path or ``hf:NAME`` of data."""
    path = Path(source).expanduser()
    written = path.suffix in (".yaml", ".yml", ".py")
    if source.startswith("hf:") or "://" in source:
        return False
    return written or not path.exists()
