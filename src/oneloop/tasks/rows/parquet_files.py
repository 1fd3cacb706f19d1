"""Parquet files as :class:`oneloop.tasks.rows.parquet.Parquet` reads them: a footer, and groups."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from xxhash import xxh3_128_hexdigest

from oneloop.tasks.rows.cache import below

_OPEN_FILES = 16  # files that stay open: reading the metadata of many groups is slow
_TAIL = 8  # bytes after the footer: its length, and PAR1


class GroupFile(Protocol):
    """A Parquet file, on a disk or elsewhere. It can be pickled, and used after a fork."""

    @property
    def name(self) -> str:
        """Return the path relative to the data set's folder, with slashes."""

    @property
    def where(self) -> str:
        """Return the path or address for messages, without secrets."""

    @property
    def size(self) -> int:
        """Return the bytes of the file."""

    @property
    def digest(self) -> str:
        """Return the :func:`footer_digest`."""

    @property
    def metadata(self) -> Any:
        """Return the footer, a ``pyarrow.parquet.FileMetaData``."""

    @property
    def schema(self) -> Any:
        """Return the ``pyarrow.Schema`` as stored."""

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Return columns of a row group, a ``pyarrow.Table``.

        Args:
            group: number of the group in this file.
            columns: names of the columns.

        Raises:
            ValueError: the group cannot be read.
        """


def footer_digest(footer: bytes) -> str:
    """Return the xxh3-128 of a file's footer, as hexadecimal.

    Args:
        footer: the encoded metadata, without its length and the last four bytes of the file.
    """
    return xxh3_128_hexdigest(footer)


class LocalFile:
    """A Parquet file on a disk, memory-mapped.

    Args:
        path: the file.
        root: the folder of the data set, or its only file.

    Raises:
        ValueError: it is not a Parquet file.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.name = below(path, root)
        self.where = str(path)
        _reader(self, os.getpid())  # raises if the file has no valid footer
        with path.open("rb") as stream:
            self.size = stream.seek(0, os.SEEK_END)
            stream.seek(-_TAIL, os.SEEK_END)
            length = int.from_bytes(stream.read(4), "little")
            stream.seek(-_TAIL - length, os.SEEK_END)
            self.digest = footer_digest(stream.read(length))

    @property
    def metadata(self) -> Any:
        return _reader(self, os.getpid()).metadata

    @property
    def schema(self) -> Any:
        return _reader(self, os.getpid()).schema_arrow

    def read(self, group: int, columns: Sequence[str]) -> Any:
        import pyarrow

        reader = _reader(self, os.getpid())
        try:
            return reader.read_row_group(group, columns=list(columns), use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{self.where}: row group {group} cannot be read: {why}") from error


# A forked process opens its own readers: its process id is another.
@lru_cache(maxsize=_OPEN_FILES)
def _reader(file: LocalFile, process: int) -> Any:
    """Return the open file of this process; those that were used least recently are closed."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file.path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{file.where} cannot be read as parquet: {' '.join(str(error).split())}"
        ) from error
