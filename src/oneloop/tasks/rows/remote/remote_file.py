"""A remote Parquet file, which implements :class:`oneloop.tasks.rows.parquet_files.GroupFile`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from oneloop.tasks.rows.cache import key_of
from oneloop.tasks.rows.parquet_files import (
    check_size,
    dictionary_columns,
    is_wanted,
    memory_bound,
)
from oneloop.tasks.rows.remote.open_store import open_store
from oneloop.tasks.rows.remote.store import OnRetry, RemoteObject, RemoteStore, ignore_retry

_REQUEST = 1 << 25  # bytes of one request
_GAP = 0.05  # neighbouring chunks are read together if the gap is below this share of both


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A Parquet file in a store. It can be pickled, and used after a fork.

    Args:
        address: the address of the data set.
        item: the object.
        where: its address for messages.
        metadata: its checked footer, a ``pyarrow.parquet.FileMetaData``.
        digest: the :func:`oneloop.tasks.rows.parquet_files.footer_digest`.
    """

    address: str
    item: RemoteObject
    where: str
    metadata: Any
    digest: str

    @property
    def name(self) -> str:
        return self.item.name

    @property
    def size(self) -> int:
        return self.item.size

    @property
    def schema(self) -> Any:
        return self.metadata.schema.to_arrow_schema()

    def ranges(self, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Return the ranges of bytes (start, end) to request for columns of a row group."""
        about = self.metadata.row_group(group)
        chunks = [about.column(index) for index in range(about.num_columns)]
        spans = [span_of(chunk) for chunk in chunks if is_wanted(chunk.path_in_schema, columns)]

        # Merge neighbours: a request costs more than a few bytes that are not used.
        merged = list[tuple[int, int]]()
        for start, end in sorted(spans):
            if merged:
                first, last = merged[-1]
                if start - last < _GAP * (max(end, last) - first):
                    merged[-1] = first, max(end, last)
                    continue
            merged.append((start, end))

        requests = []
        for start, end in merged:
            for first in range(start, end, _REQUEST):
                requests.append((first, min(first + _REQUEST, end)))
        return requests

    def read(self, group: int, columns: Sequence[str], *, on_retry: OnRetry = ignore_retry) -> Any:
        """Read columns of a row group, as a ``pyarrow.Table`` of one chunk.

        Args:
            group: number of the group.
            columns: names of the columns.
            on_retry: gets the number of failed tries of a request, and the last error.

        Raises:
            StoreError: the store fails.
            ValueError: the group cannot be decoded, or takes far more memory than the footer says.
        """
        # A forked process opens its own store: its process id is another.
        store = _opened(self.address, os.getpid())
        parts = {}
        for start, end in self.ranges(group, columns):
            parts[start, end] = store.read(self.item, start, end, on_retry=on_retry)
        return self.decoded(group, columns, parts)

    def decoded(
        self, group: int, columns: Sequence[str], parts: dict[tuple[int, int], bytes]
    ) -> Any:
        """Return the columns of a row group from fetched ranges."""
        import pyarrow
        from fsspec.spec import AbstractBufferedFile
        from pyarrow import parquet

        # A file of which only these parts are there: other reads raise ValueError.
        parts_of_file = AbstractBufferedFile(
            None,
            self.name,
            size=self.size,
            cache_type="parts",
            cache_options={"data": parts, "strict": True},
        )
        try:
            reader = parquet.ParquetFile(
                pyarrow.PythonFile(parts_of_file, mode="r"),
                metadata=self.metadata,
                read_dictionary=dictionary_columns(self.metadata),
                pre_buffer=False,  # it would read the gaps between columns
            )
            table = reader.read_row_group(group, columns=list(columns), use_threads=False)
        except (OSError, ValueError, NotImplementedError, pyarrow.ArrowException) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{self.where}: row group {group} cannot be read: {why}") from error
        finally:
            # The file and its cache refer to each other, and would stay in memory.
            parts_of_file.cache = None
        check_size(self.where, group, table.nbytes, memory_bound(self.metadata, group, columns))
        # An IPC file has one dictionary for each column.
        return table.unify_dictionaries().combine_chunks()

    def group(self, number: int, columns: Sequence[str]) -> "RowGroup":
        """Return columns of a row group, to be read later.

        Args:
            number: number of the group.
            columns: names of the columns.
        """
        name = key_of(self.where, self.size, self.item.version, number)
        return RowGroup(self, number, name, memory_bound(self.metadata, number, columns))


class RowGroup(NamedTuple):
    """A row group of a remote file."""

    file: RemoteFile
    number: int  # in the file
    name: str  # of the version of the object and this group, for a cache
    size: int  # bytes in memory at most, by the footer


def span_of(chunk: Any) -> tuple[int, int]:
    """Return the range of bytes of a column chunk, as pyarrow reads it."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


# One store of each address, of this process.
@cache
def _opened(address: str, process: int) -> RemoteStore:
    return open_store(address)
