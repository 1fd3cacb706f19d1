"""A remote Parquet file, which implements :class:`oneloop.tasks.rows.parquet_files.GroupFile`."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from oneloop.tasks.rows.parquet_files import memory_bound
from oneloop.tasks.rows.remote.footers import Footer
from oneloop.tasks.rows.remote.open_store import open_store
from oneloop.tasks.rows.remote.range_file import GroupRequest, decoded
from oneloop.tasks.rows.remote.store import RemoteObject, RemoteStore


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

    def request(self, group: int, columns: Sequence[str], *, budget: int = 0) -> GroupRequest:
        """Return the request for columns of a row group.

        Args:
            group: number of the group.
            columns: names of the columns.
            budget: bytes of all such groups that the host keeps.
        """
        size = memory_bound(self.metadata, group, columns)
        return GroupRequest(self.address, self.item, group, tuple(columns), size, budget)

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Read columns of a row group in this process, without the fetcher.

        Raises:
            StoreError: the store fails.
            ValueError: the group cannot be read.
        """
        # A forked process opens its own store: its process id is another.
        store = _opened(self.address, os.getpid())
        parts = {}
        for start, end in self.ranges(group, columns):
            parts[start] = store.read(self.item, start, end)
        return decoded(self.request(group, columns), self.where, self.metadata, parts)


# One store of each address, of this process.
@cache
def _opened(address: str, process: int) -> RemoteStore:
    return open_store(address)
