"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path, *, shared: bool = False) -> Iterator[Path]:
    """A draft beside ``file``, which takes its place at the end; after an error ``file`` is as it was.

    >>> with replacing(Path("summary.json")) as draft:
    ...     draft.write_text("{}")

    Args:
        file: to be written.
        shared: other processes may write it at the same time; each then has a draft of its own.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft" if shared else f".{file.name}.draft")
    try:
        if draft.is_symlink():
            draft.unlink()  # it would be written to where it leads
        draft.touch()
        mode = draft.stat().st_mode & 0o777  # as umask says: some libraries make theirs readable to nobody else
        yield draft
        draft.chmod(mode)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(file)
