"""Footers of remote Parquet files: read in parallel, checked, and cached on this host."""

import io
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from oneloop.basics.files import replacing
from oneloop.basics.system.start_methods import start_context
from oneloop.tasks.rows.cache import alone, key_of
from oneloop.tasks.rows.parquet_files import footer_digest
from oneloop.tasks.rows.remote.remote_file import RemoteFile, span_of
from oneloop.tasks.rows.remote.store import RemoteObject, RemoteStore

_MAGIC = b"PAR1"
_TAIL = 8  # bytes after the footer: its length, and PAR1
_FIRST_READ = 1 << 16  # bytes from the end, which hold most footers
_MOST_BYTES = 1 << 27  # of a footer
_AT_ONCE = 16  # requests
_DIGEST = 32  # bytes of the checksum before a cached footer


def opened_files(store: RemoteStore, items: Sequence[RemoteObject]) -> list[RemoteFile]:
    """Return objects with their footers, of which this host reads each version once.

    Args:
        store: the store of the objects.
        items: the objects.

    Raises:
        StoreError: the store fails.
        ValueError: a footer is damaged, or does not fit its file.
    """
    with alone(f"footers/{key_of(store.root)}") as folder, ThreadPoolExecutor(_AT_ONCE) as threads:
        folder.mkdir(exist_ok=True)
        files = {item: folder / key_of(item.name, item.size, item.version) for item in items}
        contents = {item: _cached(file) for item, file in files.items()}
        fresh = [item for item in items if not contents[item]]
        contents.update(zip(fresh, threads.map(partial(_fetched, store), fresh), strict=True))

        # Only footers that have been checked are cached.
        check_apart([(contents[item], item.size, store.where(item)) for item in fresh])
        for item in fresh:
            with replacing(files[item]) as draft:
                draft.write_bytes(footer_digest(contents[item]).encode() + contents[item])

    opened = []
    for item, content in contents.items():
        where = store.where(item)
        metadata = checked_footer(content, item.size, where)
        opened.append(RemoteFile(store.address, item, where, metadata, footer_digest(content)))
    return opened


def check_apart(footers: Sequence[tuple[bytes, int, str]]) -> None:
    """Call :func:`checked_footer` in another process, which pyarrow may abort.

    Args:
        footers: the arguments of the calls.

    Raises:
        ValueError: a footer is damaged.
    """
    with ProcessPoolExecutor(1, start_context(alone=True)) as process:
        for content, size, where in footers:
            try:
                process.submit(checked_footer, content, size, where).result()
            except BrokenProcessPool as error:
                raise ValueError(
                    f"{where} cannot be read as parquet: its footer is damaged"
                ) from error


def _cached(file: Path) -> bytes:
    """Return a cached footer; empty if it is missing or damaged."""
    if not file.exists():
        return b""
    content = file.read_bytes()
    checksum, footer = content[:_DIGEST], content[_DIGEST:]
    return footer if footer_digest(footer).encode() == checksum else b""


def _fetched(store: RemoteStore, item: RemoteObject) -> bytes:
    """Read the footer at the end of an object; check its length before reading it."""
    where = store.where(item)
    if item.size < len(_MAGIC) + _TAIL:
        raise ValueError(f"{where} is not a Parquet file: it has {item.size:,} bytes")
    start = max(0, item.size - _FIRST_READ)
    end = store.read(item, start, item.size)
    if end[-4:] != _MAGIC:
        raise ValueError(f"{where} is not a Parquet file, or it is encrypted or cut off")
    length = int.from_bytes(end[-_TAIL:-4], "little")
    most = min(item.size - len(_MAGIC) - _TAIL, _MOST_BYTES)
    if length > most:
        raise ValueError(
            f"{where}: its footer claims {length:,} bytes, but at most {most:,} are possible; the "
            "file is damaged: write it again"
        )
    first = item.size - _TAIL - length
    if first < start:
        end = store.read(item, first, start) + end
    return end[-_TAIL - length : -_TAIL]


def checked_footer(content: bytes, size: int, where: str) -> Any:
    """Return a footer, a ``FileMetaData``, after checking it against the size of its file.

    Args:
        content: the encoded metadata.
        size: bytes of the file.
        where: its address, for messages.

    Raises:
        ValueError: it is damaged, or names bytes that the file does not have.
    """
    import pyarrow
    from pyarrow import parquet

    # No text or list in a footer is longer than the footer.
    whole = _MAGIC + content + len(content).to_bytes(4, "little") + _MAGIC
    try:
        metadata = parquet.ParquetFile(
            io.BytesIO(whole),
            thrift_string_size_limit=len(content),
            thrift_container_size_limit=len(content),
        ).metadata
        wrong = _wrong(metadata, size - _TAIL - len(content))
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{where} cannot be read as parquet: {why}") from error
    if wrong:
        raise ValueError(f"{where}: its footer {wrong}; the file is damaged: write it again")
    return metadata


def _wrong(metadata: Any, end: int) -> str:
    """Return what is wrong with the counts and offsets of a footer; empty if nothing.

    Args:
        metadata: the footer.
        end: bytes of the file before its footer.
    """
    rows = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows += group.num_rows
        if group.num_rows < 0:
            return f"claims that row group {number} has {group.num_rows:,} rows"
        for index in range(group.num_columns):
            chunk = group.column(index)
            which = f"row group {number}, column {chunk.path_in_schema!r}"
            if chunk.file_path:
                return f"claims that {which} is in another file"
            start, stop = span_of(chunk)
            # A group of 0 rows has no pages, and so no offsets.
            if group.num_rows and not len(_MAGIC) <= start <= stop <= end:
                return f"claims that {which} has the bytes {start:,} to {stop:,} of {end:,}"
            flat = metadata.schema.column(index).max_repetition_level == 0
            sizes = chunk.total_compressed_size, chunk.total_uncompressed_size
            if min(chunk.num_values, *sizes) < 0:
                return f"has negative counts ({which})"
            if flat and chunk.num_values != group.num_rows:
                return f"has {chunk.num_values:,} values of {group.num_rows:,} rows ({which})"
    if rows != metadata.num_rows:
        return f"counts {metadata.num_rows:,} rows, and its row groups {rows:,}"
    return ""
