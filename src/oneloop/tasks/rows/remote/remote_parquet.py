"""Rows of remote Parquet files, which are read ahead, once per host."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Ordered
from oneloop.tasks.rows.network_traffic import Traffic
from oneloop.tasks.rows.parquet import MEGABYTE, Parquet
from oneloop.tasks.rows.remote.fetch_ahead import FetchAhead
from oneloop.tasks.rows.remote.fetch_plan import NeededGroups
from oneloop.tasks.rows.remote.remote_file import RemoteFile, RowGroup
from oneloop.tasks.rows.remote.row_group_cache import RowGroupCache


class RemoteParquet(Parquet):
    """The rows of remote Parquet files, in the same order as those of a copy on a disk.

    Args:
        files: the files.
        root: the address of the data set; for messages.
        columns: the columns to read.
        window: megabytes that a process caches; the host keeps twice as many on its disk.
        content: what caches of values depend on: the versions of the files.
        part: the split.

    Raises:
        ValueError: a column is missing, or a group exceeds the window.
    """

    remote = True

    def __init__(
        self,
        files: Sequence[RemoteFile],
        root: Path | str,
        columns: Sequence[str],
        *,
        window: int,
        content: Any,
        part: str = "",
    ) -> None:
        super().__init__(files, root, columns, window=window, content=content, part=part)
        # Two windows, since one follows the other.
        self._budget = 2 * window * MEGABYTE
        self._cache = RowGroupCache(str(root), self.columns, self._budget)

    def announce(
        self, order: Ordered, layout: BatchLayout, *, rank: int, start: int, first: int = 0
    ) -> list[FetchAhead]:
        """Fetch ahead which row groups a rank will need.

        Args:
            order: the order of samples.
            layout: how a step is divided.
            rank: of the process.
            start: position of the first step, in samples.
            first: index of the first row, if the rows are a part of a mixture.

        Returns:
            A plan with the methods ``advance``, which takes the number of steps that were read, and
            ``close``.
        """
        needed = NeededGroups(
            order,
            layout,
            rank=rank,
            start=start,
            firsts=first + np.array([*self._firsts.tolist(), len(self)]),
            sizes=self.memory_bounds(),
            budget=self._budget,
        )
        return [FetchAhead(self._cache, needed, self._group)]

    def waits(self) -> str:
        """Return what processes of this run wait for, and why; empty if they do not wait long."""
        return self._cache.waits()

    @property
    def traffic(self) -> Traffic:
        """Return what a row takes from the network, on average."""
        requests = 0
        groups = np.flatnonzero(self.sizes)
        for group in groups.tolist():
            file, number = self.file_of(group)
            requests += len(file.ranges(number, self.columns))
        size = int(self.stored_bytes()[groups].sum())
        return Traffic(size / len(self), requests / len(self))

    def _group(self, group: int) -> RowGroup:
        file, number = self.file_of(group)
        made: RowGroup = file.group(number, self.columns)
        return made

    def _table(self, group: int) -> dict[str, Any]:
        # A file that was dropped takes its place on the disk until it is dropped here, too.
        self._drop_inherited()
        if group not in self._tables:
            for held in [*self._tables]:
                if not self._cache.keeps(self._group(held)):
                    _, dropped = self._tables.pop(held)
                    self._held -= dropped
        return super()._table(group)

    def _loaded(self, group: int, columns: Sequence[str]) -> Any:
        # Some columns of all groups are read once, before a run, and are not kept.
        if [*columns] != self.columns:
            return super()._loaded(group, columns)
        return self._cache.read(self._group(group))
