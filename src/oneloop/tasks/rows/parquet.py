"""Rows of Parquet files, read in place; only a few row groups are in memory at a time."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oneloop.data.order import Ordered, StoredOrder
from oneloop.tasks.rows.cache import content_of, described, numbers_key
from oneloop.tasks.rows.find_files import Found
from oneloop.tasks.rows.objects import NoColumn, down_to, reject_some, value_of
from oneloop.tasks.rows.parquet_files import (
    GroupFile,
    LocalFile,
    check_size,
    check_window,
    column_types,
    decoded_column,
    memory_bound,
    stored_size,
)
from oneloop.tasks.rows.row_group_order import Windows
from oneloop.tasks.rows.rows import Row

MEGABYTE = 1 << 20
_SLACK = 1.25  # cached groups may use this multiple of the window, so that two windows can overlap
_SLICE = 4096  # rows that are decoded together: dictionary-encoded texts may become much larger


class _Group(NamedTuple):
    """A row group."""

    file: GroupFile
    number: int  # in its file
    rows: int
    size: int  # bytes in memory, at most
    first: int  # number of the first row in its file


class Parquet:
    """The rows of Parquet files.

    Their order is :class:`oneloop.tasks.rows.row_group_order.Windows`.

    Args:
        files: the files.
        root: the folder of the data set, its only file, or an address; for messages.
        columns: the columns to read.
        window: megabytes that a process caches.
        content: what caches of values depend on: the checksums of the files' content, or if they
            are remote, their versions.
        part: the split.

    Raises:
        ValueError: a file or column is missing, or a group exceeds the window.
    """

    remote = False  # whether the files are elsewhere; the fingerprint has then no checksum

    def __init__(
        self,
        files: Sequence[GroupFile],
        root: Path | str,
        columns: Sequence[str],
        *,
        window: int,
        content: Any,
        part: str = "",
    ) -> None:
        self.files = list(files)
        self.columns = list(columns)
        self.root = root
        self.window = window
        self.content = content
        self._chosen: dict[str, Any] = {"part": part}  # which rows of the files these are
        self._footers = described({file.name: [file.size, file.digest] for file in self.files})

        # Read the metadata of all row groups.
        self._types: Mapping[str, Any] = {}
        self._groups = list[_Group]()
        lacking = list[NoColumn]()
        for file in self.files:
            try:
                self._groups += self._groups_of(file)
            except NoColumn as error:
                lacking.append(error)
        reject_some(lacking, len(self.files))
        for group in self._groups:
            check_window(
                str(root),
                group.file.where,
                group.number,
                rows=group.rows,
                size=group.size,
                window=window,
            )

        # Number the rows, all of which are selected.
        # the numbers of the selected rows in each group as stored; None: all rows
        self._picked: list[NDArray[np.int64]] | None = None
        self._number(np.array([group.rows for group in self._groups], dtype=np.int64))

        self.reads = 0  # groups that this process has read
        self._clear_cache()

    def _clear_cache(self) -> None:
        # columns of the cached groups, and their bytes
        self._tables: OrderedDict[int, tuple[dict[str, Any], int]] = OrderedDict()
        self._held = 0  # bytes of the cached tables
        self._owner = os.getpid()

    def _drop_inherited(self) -> None:
        """Drop the parent's tables in a forked worker process."""
        if self._owner != os.getpid():
            self._clear_cache()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict(), "_held": 0, "reads": 0}

    def _number(self, sizes: NDArray[np.int64]) -> None:
        """Number the rows, given the selected rows of each group."""
        self.sizes = sizes
        self._length = int(sizes.sum())
        self._firsts = np.cumsum(sizes) - sizes  # number of each group's first row

    def _groups_of(self, file: GroupFile) -> list[_Group]:
        """Return the groups of one file; check its columns and types."""
        schema = file.schema
        metadata = file.metadata
        for column in self.columns:
            down_to(schema.empty_table(), column, file.where)

        # All files must have the types of the first one.
        types = column_types(schema, self.columns, file.where)
        if self._types:
            for name, kind in types.items():
                if kind != self._types[name]:
                    others = self.files[0].where
                    raise ValueError(
                        f"{file.where}: column {name!r} has type {kind} here and "
                        f"{self._types[name]} in {others}; write the files with one schema"
                    )
        self._types = types

        groups = list[_Group]()
        first = 0
        for number in range(metadata.num_row_groups):
            size = memory_bound(metadata, number, self.columns)
            rows = metadata.row_group(number).num_rows
            groups.append(_Group(file, number, rows, size, first))
            first += rows
        return groups

    @property
    def types(self) -> Mapping[str, Any]:
        return self._types

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        group, row = self._locate(index)
        columns = self._table(group)
        return {name: value_of(columns[name][row].as_py(), self._types[name]) for name in columns}

    def values(self, column: str) -> Iterator[Any]:
        """Yield the column as Arrow arrays, in row order; skip groups without selected rows."""
        for group in np.flatnonzero(self.sizes).tolist():
            array = self.read(group, [column])[0][column]
            if self._picked is not None:
                array = array.take(self._picked[group])
            for start in range(0, len(array), _SLICE):
                yield decoded_column(array.slice(start, _SLICE), self._types[column])

    def near(self, index: int) -> range:
        """Return the rows of the same row group."""
        group, _ = self._locate(index)
        first = int(self._firsts[group])
        return range(first, first + int(self.sizes[group]))

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the group of a row, and the row's number in the group as stored."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        group = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return group, int(self._stored(group, index - self._firsts[group]))

    def _stored(self, group: int, rows: Any) -> Any:
        """Return the numbers of selected rows in their group as stored."""
        return rows if self._picked is None else self._picked[group][rows]

    def where(self, index: int) -> str:
        number, row = self._locate(index)
        group = self._groups[number]
        return f"{group.file.where}, row {group.first + row}"

    def _table(self, group: int) -> dict[str, Any]:
        """Return the columns of a group, from the cache if they are there."""
        self._drop_inherited()
        if group in self._tables:
            self._tables.move_to_end(group)
            columns, _ = self._tables[group]
            return columns
        columns, size = self.read(group)

        # Drop the groups that were used least recently.
        while self._tables and self._held + size > _SLACK * self.window * MEGABYTE:
            _, (_, dropped) = self._tables.popitem(last=False)
            self._held -= dropped
        self._tables[group] = columns, size
        self._held += size
        return columns

    def read(self, group: int, columns: Sequence[str] | None = None) -> tuple[dict[str, Any], int]:
        """Return columns of a group as Arrow arrays, and their bytes in memory.

        Texts may be dictionary-encoded.

        Args:
            group: number of the group.
            columns: names of the columns; None: all of this object.

        Raises:
            ValueError: the group cannot be read, or is far larger than its footer says.
        """
        names = list(columns or self.columns)
        file, number = self.file_of(group)
        table = self._loaded(group, names)
        self.reads += 1
        # Combining would copy even a single chunk, which may be mapped.
        arrays = {}
        for name in names:
            column = down_to(table, name, file.where).column(name)
            arrays[name] = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        size = sum(array.nbytes for array in arrays.values())
        check_size(file.where, number, size, self._groups[group].size)
        return arrays, size

    def _loaded(self, group: int, columns: Sequence[str]) -> Any:
        """Return columns of a group, a ``pyarrow.Table``."""
        file, number = self.file_of(group)
        return file.read(number, columns)

    def file_of(self, group: int) -> tuple[Any, int]:
        """Return the file of a group, a :class:`GroupFile`, and the group's number in it."""
        file, number, *_ = self._groups[group]
        return file, number

    def memory_bounds(self) -> NDArray[np.int64]:
        """Return the bytes of each row group in memory, at most."""
        return np.array([group.size for group in self._groups], dtype=np.int64)

    def select(self, indices: NDArray[np.int64]) -> "Parquet":
        made = copy(self)
        made._chosen = {**self._chosen, "rows": numbers_key(indices)}

        # Divide the indices by group, and number them within it.
        bounds = np.searchsorted(indices, [*self._firsts.tolist(), self._length])
        made._picked = []
        for group, first in enumerate(self._firsts.tolist()):
            rows = indices[bounds[group] : bounds[group + 1]] - first
            made._picked.append(self._stored(group, rows))
        made._number(np.diff(bounds))
        return made

    def filled_groups(self) -> dict[int, tuple[str, int]]:
        """Return file name and number in the file of each group with rows, by its number here."""
        groups = enumerate(self._groups)
        return {index: (group.file.name, group.number) for index, group in groups if group.rows}

    def select_groups(self, groups: NDArray[np.int64]) -> "Parquet":
        """Return the selected rows of some groups, by their ascending numbers here."""
        made = copy(self)
        made._chosen = {**self._chosen, "groups": numbers_key(groups)}
        made._groups = [self._groups[group] for group in groups.tolist()]
        if self._picked is not None:
            made._picked = [self._picked[group] for group in groups.tolist()]
        made._number(self.sizes[groups])
        return made

    @property
    def open_groups(self) -> int:
        """Return how many groups fit into the window, by the largest group."""
        largest = max(1, *(group.size for group in self._groups))
        return max(1, self.window * MEGABYTE // largest)

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        if not shuffle:
            return StoredOrder(len(self))
        return Windows(self.sizes, seed=seed, open_groups=self.open_groups, batch=batch)

    def about(self) -> str:
        """Return how the rows are read, for the log."""
        groups = len(self._groups)
        fitting = "all" if self.open_groups >= groups else f"{self.open_groups} at a time"
        return (
            f"{len(self.files):,} parquet files, {groups:,} row groups, of which {fitting} fit "
            f"into task.window ({self.window} MB per process)"
        )

    def stored_bytes(self, columns: Sequence[str] | None = None) -> NDArray[np.int64]:
        """Return the compressed bytes of columns (default: all of this object) by row group."""
        names = list(columns or self.columns)
        sizes = [stored_size(group.file.metadata, group.number, names) for group in self._groups]
        return np.array(sizes, dtype=np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Return a description of the rows that is equal for a copy of the files elsewhere.

        It has the files' sizes and footers. On a disk, the checksum adds their content.
        """
        # It imports torch's sharding and accelerate, which --help and wrong keys do not need.
        from oneloop.basics.content_hash import content_hash

        made = {
            "length": len(self),
            "columns": sorted(self.columns),
            **self._footers,
            **self._chosen,
        }
        files = None if self.remote else content_hash(self.content.get("files"))
        return {**made, "content of the files": files}

    def cache_key(self) -> dict[str, Any]:
        """Return a description of the rows by content, for caches of this machine."""
        columns = sorted(self.columns)
        return {"length": len(self), "columns": columns, **self.content, **self._chosen}


def parquets(found: Found[Path], columns: Sequence[str], *, window: int) -> dict[str, Parquet]:
    """Return the files' rows by split; raise as :class:`Parquet`.

    Args:
        found: the files.
        columns: the columns to read.
        window: megabytes that a process caches.
    """
    made = {}
    for split, files in found.parts.items():
        content = content_of(files, found.root)
        opened = [LocalFile(file, found.root) for file in files]
        made[split] = Parquet(
            opened, found.root, columns, window=window, content=content, part=split
        )
    return made
