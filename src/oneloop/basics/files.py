"""Files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A draft beside ``file``, which takes its place at the end; after an error ``file`` is as it was.

    >>> with replacing(Path("summary.json")) as draft:
    ...     draft.write_text("{}")
    """
    draft = file.with_name(f".{file.name}.draft")
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(file)
