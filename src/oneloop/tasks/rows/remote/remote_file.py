"""A remote Parquet file, which implements :class:`oneloop.tasks.rows.parquet_files.GroupFile`."""

import io
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from oneloop.basics.bucket import StoreError
from oneloop.tasks.rows.parquet_files import check_size, dictionary_columns, memory_bound
from oneloop.tasks.rows.remote.footers import Footer
from oneloop.tasks.rows.remote.store import RemoteObject, RemoteStore, open_store


class RemoteFile:
    """A Parquet file in a store. It can be pickled, and used after a fork.

    Args:
        address: of the store.
        item: the object.
        where: its address for messages.
        footer: its checked footer.
    """

    def __init__(self, address: str, item: RemoteObject, where: str, footer: Footer) -> None:
        self.address = address
        self.item = item
        self.name = item.name
        self.where = where
        self.size = item.size
        self.footer = footer
        self.digest = footer.digest

    @property
    def metadata(self) -> Any:
        return self.footer.metadata

    @property
    def schema(self) -> Any:
        return self.metadata.schema.to_arrow_schema()

    def ranges(self, group: int, columns: Sequence[str]) -> Sequence[tuple[int, int]]:
        return self.footer.ranges(group, columns)

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Read columns of a row group in this process.

        Raises:
            StoreError: the store fails.
            ValueError: the group cannot be read.
        """
        import pyarrow
        from pyarrow import parquet

        # A forked process opens its own store: its process id is another.
        source = _Ranges(_opened(self.address, os.getpid()), self.item)
        try:
            reader = parquet.ParquetFile(
                pyarrow.PythonFile(source, mode="r"),
                metadata=self.metadata,
                read_dictionary=dictionary_columns(self.metadata),
            )
            table = reader.read_row_group(group, columns=list(columns), use_threads=False)
        except StoreError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{self.where}: row group {group} cannot be read: {why}") from error
        check_size(self.where, group, table.nbytes, memory_bound(self.metadata, group, columns))
        return table


class _Ranges(io.RawIOBase):
    """An object as a file, of which each read is a request; pyarrow reads column chunks whole."""

    def __init__(self, store: RemoteStore, item: RemoteObject) -> None:
        self._store = store
        self._item = item
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.size}
        self._at = base[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        start = self._at
        self._at = self._item.size if size < 0 else min(start + size, self._item.size)
        return self._store.read(self._item, start, self._at)


# One store of each address, of this process.
@cache
def _opened(address: str, process: int) -> RemoteStore:
    return open_store(address)
