"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a draft that replaces ``file`` at the end; after an exception ``file`` is unchanged. With ``shared``,
    several processes may write it at the same time.

    >>> with replacing(Path("summary.json")) as draft:
    ...     draft.write_text("{}")
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
