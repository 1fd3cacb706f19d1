"""Parquet files as :class:`oneloop.tasks.rows.parquet.Parquet` reads them: a footer, and groups."""

import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from xxhash import xxh3_128_hexdigest

from oneloop.tasks.rows.cache import below

_OPEN_FILES = 16  # files that stay open: reading the metadata of many groups is slow
_TAIL = 8  # bytes after the footer: its length, and PAR1
_MEGABYTE = 1 << 20

# bytes of a value in memory, by physical type; of FIXED_LEN_BYTE_ARRAY, the footer states them
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 8}
_DECIMAL = 16  # bytes of a decimal number in memory, whatever its physical type is
_POINTER = 8  # bytes of an index or an offset in memory, at most


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


def memory_bound(metadata: Any, group: int, columns: Sequence[str]) -> int:
    """Return the bytes that columns of a row group need in memory at most, by the footer alone.

    Texts that the file stores once, with an index per value (dictionary encoding), also stay so in
    memory: see :func:`dictionary_columns`.

    Args:
        metadata: the footer.
        group: number of the group in its file.
        columns: names of the columns.
    """
    about = metadata.row_group(group)
    total = 0
    for index in range(about.num_columns):
        column = about.column(index)
        if not is_wanted(column.path_in_schema, columns):
            continue
        leaf = metadata.schema.column(index)
        width = _WIDTHS.get(column.physical_type, 0)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            width = leaf.length
        if leaf.logical_type.type == "DECIMAL":
            width = max(width, _DECIMAL)
        total += max(column.total_uncompressed_size, width * column.num_values)

        # A text has an index or an offset. A list has an offset, too: of the outer lists, each row
        # has one; inner lists are at most as many as the values.
        if column.physical_type == "BYTE_ARRAY":
            total += _POINTER * column.num_values
        if leaf.max_repetition_level:
            inner = leaf.max_repetition_level - 1
            total += _POINTER * (about.num_rows + inner * column.num_values)
    return int(total)


def stored_size(metadata: Any, group: int, columns: Sequence[str]) -> int:
    """Return the bytes of columns of a row group in the file (compressed)."""
    about = metadata.row_group(group)
    stored = map(about.column, range(about.num_columns))
    wanted = [one for one in stored if is_wanted(one.path_in_schema, columns)]
    return sum(one.total_compressed_size for one in wanted)


def check_size(where: str, group: int, size: int, bound: int) -> None:
    """Raise ValueError if a group takes far more memory than its footer says.

    Args:
        where: path or address of the file.
        group: number of the group in the file.
        size: bytes that it takes.
        bound: the :func:`memory_bound`.
    """
    if size > 2 * bound + _MEGABYTE:
        raise ValueError(
            f"{where}: row group {group} decompresses to {size / _MEGABYTE:,.1f} MB, although its "
            f"footer states {bound / _MEGABYTE:,.1f} MB; the file is damaged, or was made to fill "
            "the memory: write it again"
        )


def dictionary_columns(metadata: Any) -> list[str]:
    """Return the columns of texts or bytes to keep dictionary-encoded in memory, by path.

    pyarrow cannot do so with columns of which a part has one of the DELTA encodings.
    """
    found = []
    for index in range(metadata.num_columns):
        if metadata.schema.column(index).physical_type != "BYTE_ARRAY":
            continue
        encodings = set()
        for group in range(metadata.num_row_groups):
            encodings.update(metadata.row_group(group).column(index).encodings)
        if "DICTIONARY" in " ".join(encodings) and "DELTA" not in " ".join(encodings):
            found.append(metadata.schema.column(index).path)
    return found


def is_wanted(path: str, columns: Sequence[str]) -> bool:
    """Return whether a stored column is one of the columns, or a field of one."""
    return any(path == column or path.startswith(f"{column}.") for column in columns)


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
        self.dictionaries = dictionary_columns(_opened(path, []).metadata)
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
        return self.metadata.schema.to_arrow_schema()

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
    return _opened(file.path, file.dictionaries)


def _opened(path: Path, dictionaries: Sequence[str]) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path, memory_map=True, read_dictionary=dictionaries)
    except (OSError, pyarrow.ArrowException) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as parquet: {why}") from error


def decoded_column(array: Any, kind: Any) -> Any:
    """Return an array without dictionaries and views, which few functions of Arrow can read.

    Args:
        array: values of a column.
        kind: the column's type, of :func:`plain_features`.
    """
    from datasets import Features

    stored = str(array.type)  # also of lists
    if "dictionary<" in stored or "_view" in stored:
        return array.cast(Features({"": kind}).arrow_schema.field(0).type)
    return array


def plain_features(features: Any) -> Any:
    """Return features of ``datasets`` in which views of texts and bytes are texts and bytes."""
    described = re.sub(r'("dtype": "\w+)_view"', r'\1"', json.dumps(features.to_dict()))
    return type(features).from_dict(json.loads(described))


def column_types(schema: Any, columns: Sequence[str], where: str) -> dict[str, Any]:
    """Return the columns' types: features of ``datasets`` by name.

    Args:
        schema: Arrow schema of a file.
        columns: names of the columns.
        where: path or address of the file.

    Raises:
        ValueError: ``datasets`` does not support a type.
    """
    import pyarrow
    from datasets import Features

    stored = []
    for field in schema:
        if any(is_wanted(name, [field.name]) for name in columns):
            stored.append(field)
    types: dict[str, Any] = {}
    try:
        for column in columns:
            features = Features.from_arrow_schema(pyarrow.schema(stored, schema.metadata))
            while column not in features:
                features = features.flatten(max_depth=2)
            types[column] = features[column]
        return dict(plain_features(Features(types)))
    except Exception as error:  # types that datasets does not support
        kinds = ", ".join(f"{field.name} is {field.type}" for field in stored)
        raise ValueError(f"{where}: {kinds}, which is not supported ({error})") from error


def check_window(root: str, where: str, group: int, *, rows: int, size: int, window: int) -> None:
    """Raise ValueError if a group exceeds the window; the message has two ways out.

    Args:
        root: folder or address of the data set.
        where: path or address of the file.
        group: number of the group in the file.
        rows: of the group.
        size: its bytes in memory.
        window: megabytes.
    """
    if size <= window * _MEGABYTE:
        return
    fitting = max(1, rows * window * _MEGABYTE // (16 * size))
    larger = 2 ** int(8 * size / _MEGABYTE).bit_length()
    folder = "A_COPY" if "://" in root else root
    raise ValueError(
        f"{where}: row group {group} has {rows:,} rows of {size / _MEGABYTE:,.1f} MB, and "
        f"task.window is {window} MB; write smaller groups "
        f"(python -m oneloop.tasks.rows.rewrite {folder} NEW_FOLDER --rows {fitting}), or "
        f"give it more memory (--task.window {larger})"
    )
