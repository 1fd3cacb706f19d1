"""Rows of Parquet files, read in place; only a few row groups are in memory at a time."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.order import Ordered
from oneloop.data.row_group_order import Windows
from oneloop.data.rows.arrow_tables import no_column
from oneloop.data.rows.cache import content_of, numbers_key
from oneloop.data.rows.find_files import Found
from oneloop.data.rows.rows import Row

_MEGABYTE = 1 << 20
_SLACK = 1.25  # cached groups may use this multiple of the window, so that two windows can overlap
_SAMPLED_GROUPS = 16  # groups that are read to estimate their size in memory
_OPEN_FILES = 16  # files that stay open: reading the metadata of many groups is slow


class Parquet:
    """The rows of Parquet files, in the order of :class:`oneloop.data.row_group_order.Windows`.

    A process caches ``window`` megabytes. ``content`` is the fingerprint. Raises ValueError if a
    file or column is missing, or a group exceeds the window."""

    def __init__(
        self,
        files: Sequence[Path],
        root: Path,
        columns: Sequence[str],
        *,
        window: int,
        content: Any,
    ) -> None:
        self.files, self.columns = list(files), list(columns)
        self.root, self.window, self.content = root, window, content
        groups: list[tuple[int, int, int, int]] = []
        self._types: Mapping[str, Any] = {}
        self._repeats = False
        """whether a text column is dictionary-encoded, and so larger in memory than its recorded
        size"""
        for number, file in enumerate(self.files):
            groups += self._groups_of(number, file)
        # file, number in it, rows, bytes of each group
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 4)
        self._exclude = False  # whether the rows are all but the picked ones
        self._picked: list[NDArray[np.int64]] | None = None
        self._number(self._groups[:, 2])
        self.reads = 0  # groups that this process has read
        self._clear_cache()
        self._groups[:, 3] = np.ceil(self._groups[:, 3] * self._memory_ratio())
        self.reads = 0
        for file_number, group, rows, size in self._groups.tolist():
            if size > self.window * _MEGABYTE:
                raise ValueError(self._too_large(self.files[file_number], group, rows, size))

    def _memory_ratio(self) -> float:
        """Return the ratio of size in memory to recorded size, from a few groups. It is rounded up
        to a power of 2 ** (1/4), since the order of samples depends on it."""
        if not self._repeats:
            return 1.0
        some = np.unique(
            np.linspace(0, len(self._groups) - 1, _SAMPLED_GROUPS).astype(np.int64)
        ).tolist()
        larger = max(self.read(group)[1] / max(1, self._groups[group, 3]) for group in some)
        return float(2 ** (np.ceil(4 * np.log2(max(1.0, larger))) / 4))

    def _clear_cache(self) -> None:
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._held, self._owner = 0, os.getpid()

    def _drop_inherited(self) -> None:
        # a forked worker process: drop the parent's tables and open files
        if self._owner != os.getpid():
            self._clear_cache()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict(), "_open": OrderedDict(), "_held": 0}

    def _number(self, sizes: NDArray[np.int64]) -> None:
        self.sizes, self._length = sizes, int(sizes.sum())  # rows of each group, and all
        self._firsts = np.cumsum(sizes) - sizes

    def _groups_of(self, number: int, file: Path) -> list[tuple[int, int, int, int]]:
        with self._opened(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            for column in self.columns:
                if schema.names.count(column) != 1:
                    raise no_column(str(file), column, schema.names)
            types = _types(schema, self.columns, file)
            if self._types and types != self._types:
                changed = next(name for name in types if types[name] != self._types[name])
                apart = (
                    f"has type {types[changed]} here and {self._types[changed]} in {self.files[0]}"
                )
                raise ValueError(
                    f"{file}: column {changed!r} {apart}; write the files with one schema"
                )
            self._types = types
            found = []
            for group in range(metadata.num_row_groups):
                about = metadata.row_group(group)
                columns = [about.column(column) for column in range(about.num_columns)]
                read = [
                    column for column in columns if _wanted(column.path_in_schema, self.columns)
                ]
                self._repeats |= any(
                    column.physical_type == "BYTE_ARRAY"
                    and any("DICTIONARY" in e for e in column.encodings)
                    for column in read
                )
                found.append((number, group, about.num_rows, sum(map(_bytes, read))))
            return found

    def _too_large(self, file: Path, group: int, rows: int, size: int) -> str:
        fitting = max(1, rows * self.window * _MEGABYTE // (16 * size))
        held = (
            f"row group {group} has {rows:,} rows of {size / _MEGABYTE:,.1f} MB, and task.window "
            f"is {self.window} MB"
        )
        smaller = f"python -m oneloop.data.rows.rewrite {self.root} NEW_FOLDER --rows {fitting}"
        larger = f"--task.window {2 ** int(8 * size / _MEGABYTE).bit_length()}"
        return (
            f"{file}: {held}; write smaller groups ({smaller}), or give it more memory ({larger})"
        )

    def _opened(self, file: Path) -> Any:
        import pyarrow
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(file, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"{file} cannot be read as parquet: {' '.join(str(error).split())}"
            ) from error

    @property
    def types(self) -> Mapping[str, Any]:
        return self._types

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        group, row = self._locate(index)
        return {name: column[row].as_py() for name, column in self._table(group).items()}

    def values(self, column: str) -> Iterator[Any]:
        """Yield the column as Arrow arrays, in row order."""
        for group in range(len(self._groups)):
            array = self.read(group, [column])[0][column]
            if self._picked is not None:
                picked = self._picked[group]
                array = array.take(
                    np.delete(np.arange(len(array)), picked) if self._exclude else picked
                )
            yield array

    def near(self, index: int) -> range:
        """Return the rows of the same row group."""
        group, _ = self._locate(index)
        last = group + 1 == len(self._firsts)
        return range(
            int(self._firsts[group]), self._length if last else int(self._firsts[group + 1])
        )

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        group = int(np.searchsorted(self._firsts, index, side="right")) - 1
        row = int(index - self._firsts[group])
        if self._picked is None:
            return group, row
        picked = self._picked[group]
        if not self._exclude:
            return group, int(picked[row])
        return group, row + int(np.searchsorted(picked - np.arange(len(picked)), row, side="right"))

    def where(self, index: int) -> str:
        group, row = self._locate(index)
        file, number, _, _ = self._groups[group].tolist()
        earlier = self._groups[
            (self._groups[:, 0] == file) & (self._groups[:, 1] < number), 2
        ].sum()
        return f"{self.files[file]}, row {int(earlier) + row}"

    def _table(self, group: int) -> dict[str, Any]:
        self._drop_inherited()
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group][0]  # type: ignore[no-any-return]
        columns, size = self.read(group)
        while self._tables and self._held + size > _SLACK * self.window * _MEGABYTE:
            self._held -= self._tables.popitem(last=False)[1][1]
        self._tables[group] = columns, size
        self._held += size
        return columns

    def read(self, group: int, columns: Sequence[str] | None = None) -> tuple[dict[str, Any], int]:
        """Return columns of a group (default: all requested) as Arrow arrays, and their bytes."""
        import pyarrow

        self._drop_inherited()
        names = list(columns or self.columns)
        file, number, _, _ = self._groups[group].tolist()
        try:
            table = self._file(file).read_row_group(number, columns=names, use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"{self.files[file]}: row group {number} cannot be read: {why}"
            ) from error
        self.reads += 1
        return {name: table.column(name).combine_chunks() for name in names}, table.nbytes

    def _file(self, number: int) -> Any:
        if number not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = self._opened(self.files[number])
        self._open.move_to_end(number)
        return self._open[number]

    def select(
        self, indices: NDArray[np.int64], *, exclude: bool = False, index_file: Path | None = None
    ) -> "Parquet":
        made = object.__new__(Parquet)
        made.__dict__.update(self.__dict__)
        bounds = np.searchsorted(indices, [*self._firsts.tolist(), self._length])
        made._picked = [
            indices[a:b] - f for a, b, f in zip(bounds, bounds[1:], self._firsts, strict=False)
        ]
        made._exclude = exclude
        made.content = {**self.content, "rows": numbers_key(indices, exclude=exclude)}
        picked = np.diff(bounds)
        made._number(self.sizes - picked if exclude else picked)
        made.reads = 0
        made._clear_cache()
        return made

    @property
    def open_groups(self) -> int:
        """Return how many groups fit into the window, by the largest group."""
        return max(1, self.window * _MEGABYTE // max(1, int(self._groups[:, 3].max())))

    def order(self, *, seed: int, batch: int) -> Ordered:
        return Windows(self.sizes, seed=seed, open_groups=self.open_groups, batch=batch)

    def about(self) -> str:
        groups, held = len(self._groups), min(self.open_groups, len(self._groups))
        where = f"{len(self.files):,} parquet files, {groups:,} row groups"
        if held == groups:
            return f"{where}, all of which fit into task.window ({self.window} MB per process)"
        return (
            f"{where}, shuffled among {held} at a time (task.window: {self.window} MB per process)"
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"length": len(self), "columns": sorted(self.columns), **self.content}


def _types(schema: Any, columns: Sequence[str], file: Path) -> dict[str, Any]:
    import pyarrow
    from datasets import Features

    kept = pyarrow.schema([schema.field(column) for column in columns], metadata=schema.metadata)
    try:
        return dict(Features.from_arrow_schema(kept))
    except Exception as error:  # types that datasets does not support
        kinds = ", ".join(f"{column} is {schema.field(column).type}" for column in columns)
        raise ValueError(f"{file}: {kinds}, which is not supported ({error})") from error


def _wanted(path: str, columns: Sequence[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def _bytes(about: Any) -> int:
    """Return the bytes of a column of a group in memory, from the file's metadata."""
    width = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 8}.get(
        about.physical_type, 0
    )
    return max(int(about.total_uncompressed_size), int(width * about.num_values))


def parquets(found: Found, columns: Sequence[str], *, window: int) -> dict[str, Parquet]:
    """Return the files' rows by split; raises as :class:`Parquet`."""
    return {
        name: Parquet(
            files,
            found.root,
            columns,
            window=window,
            content=content_of(files, found.root) | {"part": name},
        )
        for name, files in found.parts.items()
    }
