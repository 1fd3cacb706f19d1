"""Footers of remote Parquet files: read in parallel, checked, and cached on this host."""

import io
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oneloop
from oneloop.basics.files import one_line, replacing
from oneloop.tasks.rows.cache import alone, key_of
from oneloop.tasks.rows.parquet_files import footer_digest, is_wanted
from oneloop.tasks.rows.remote.store import RemoteObject, RemoteStore

_MAGIC = b"PAR1"
_TAIL = 8  # bytes after the footer: its length, and PAR1
_FIRST_READ = 1 << 16  # bytes from the end, which hold most footers
_MOST_BYTES = 1 << 27  # of a footer
_REQUEST = 1 << 25  # bytes of one request
_GAP = 0.05  # neighbouring chunks are read together if the gap is below this share of both
_AT_ONCE = 16  # requests
_DIGEST = 32  # bytes of the checksum before a cached footer


@dataclass(frozen=True)
class Footer:
    """The checked footer of a Parquet file.

    Args:
        metadata: a ``pyarrow.parquet.FileMetaData``.
        digest: the :func:`oneloop.tasks.rows.parquet_files.footer_digest`.
    """

    metadata: Any
    digest: str

    def ranges(self, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Return the ranges of bytes (start, end) to request for columns of a row group."""
        about = self.metadata.row_group(group)
        chunks = [about.column(index) for index in range(about.num_columns)]
        spans = [_span(chunk) for chunk in chunks if is_wanted(chunk.path_in_schema, columns)]

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


def footers(store: RemoteStore, objects: Sequence[RemoteObject]) -> list[Footer]:
    """Return the footers of objects, of which this host reads each version once.

    Raises:
        StoreError: the store fails.
        ValueError: a footer is damaged, or does not fit its file.
    """

    wheres = [store.where(item) for item in objects]
    with alone(f"footers/{key_of(store.root)}") as folder, ThreadPoolExecutor(_AT_ONCE) as threads:
        folder.mkdir(exist_ok=True)
        files = [folder / key_of(item.name, item.size, item.version) for item in objects]
        contents = [_cached(file) for file in files]
        fresh = [number for number, content in enumerate(contents) if content is None]
        fetched = threads.map(lambda number: _fetched(store, objects[number]), fresh)
        for number, footer in zip(fresh, fetched, strict=True):
            contents[number] = footer

        # Only footers that have been checked are cached.
        _try([(contents[number], objects[number].size, wheres[number]) for number in fresh])
        for number in fresh:
            checked = contents[number] or b""
            with replacing(files[number]) as draft:
                draft.write_bytes(footer_digest(checked).encode() + checked)
    found = []
    for item, content, where in zip(objects, contents, wheres, strict=True):
        found.append(parsed(content or b"", item.size, where))
    return found


def _try(arguments: Sequence[Any]) -> None:
    """Call :func:`parsed` in another process, which pyarrow may abort at a damaged footer.

    Args:
        arguments: of the calls.

    Raises:
        ValueError: a footer is damaged.
    """
    if not arguments:
        return
    root = str(Path(oneloop.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import _main; _main()"
    words = [sys.executable, "-c", code]
    child = subprocess.run(words, input=pickle.dumps(arguments), capture_output=True)
    # It reports each footer; the last line may be an error.
    lines = child.stdout.decode(errors="replace").splitlines()
    if lines and lines[-1]:
        raise ValueError(lines[-1])
    if child.returncode:
        where = arguments[min(len(lines), len(arguments) - 1)][2]
        raise ValueError(f"{where} cannot be read as parquet: its footer is damaged")


def _main() -> None:
    """Check the footers from standard input; print an empty line for each, or what is wrong."""
    for content, size, where in pickle.load(sys.stdin.buffer):
        try:
            parsed(content, size, where)
        except ValueError as error:
            print(one_line(error))
            return
        print(flush=True)


def _cached(file: Path) -> bytes | None:
    """Return a cached footer; None if it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, footer = content[:_DIGEST], content[_DIGEST:]
    return footer if footer_digest(footer).encode() == checksum else None


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


def parsed(content: bytes, size: int, where: str) -> Footer:
    """Return a footer after checking it against the size of its file.

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
    return Footer(metadata, footer_digest(content))


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
            start, stop = _span(chunk)
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


def _span(chunk: Any) -> tuple[int, int]:
    """Return the range of bytes of a column chunk, as pyarrow reads it."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size
