"""A row group of a remote Parquet file: what is requested, and decoding it from fetched ranges."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneloop.tasks.rows.parquet_files import check_size, dictionary_columns
from oneloop.tasks.rows.remote.store import RemoteObject


@dataclass(frozen=True)
class GroupRequest:
    """Columns of a row group, as the processes of a run request it from their fetcher."""

    address: str  # of the data set
    item: RemoteObject
    group: int  # number of the group in the file
    columns: tuple[str, ...]
    size: int  # bytes in memory at most, by the footer
    budget: int  # bytes of all such groups that the host keeps


class RangeFile(io.RawIOBase):
    """A file of which only some ranges are there; reading others raises ValueError.

    Args:
        size: bytes of the whole file.
        parts: the fetched bytes by their offset.
    """

    def __init__(self, size: int, parts: Mapping[int, bytes]) -> None:
        self._size = size
        self._parts = sorted(parts.items())
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        found = []
        for start, content in self._parts:
            if start <= self._at < min(end, start + len(content)):
                piece = memoryview(content)[self._at - start : end - start]
                self._at += len(piece)
                found.append(piece)
        if self._at < end:
            raise ValueError(f"the bytes from {self._at:,} to {end:,} are not those of the columns")
        return b"".join(found)


def decoded(request: GroupRequest, where: str, metadata: Any, parts: Mapping[int, bytes]) -> Any:
    """Return the columns of a row group as a ``pyarrow.Table`` of one chunk.

    Args:
        request: the group.
        where: address of the file, for messages.
        metadata: its footer.
        parts: the fetched bytes by their offset.

    Raises:
        ValueError: they cannot be decoded, or take far more memory than the footer says.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(
            pyarrow.PythonFile(RangeFile(request.item.size, parts), mode="r"),
            metadata=metadata,
            read_dictionary=dictionary_columns(metadata),
            pre_buffer=False,  # it would read the gaps between columns
        )
        names: Sequence[str] = list(request.columns)
        table = reader.read_row_group(request.group, columns=names, use_threads=False)
        check_size(where, request.group, table.nbytes, request.size)
        # An IPC file has one dictionary for each column.
        return table.unify_dictionaries().combine_chunks()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if str(error).startswith(where):
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"{where}: row group {request.group} cannot be read: {why}") from error
