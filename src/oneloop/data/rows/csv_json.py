"""Files of text rows (JSON Lines, csv) as memory-mapped Arrow.

They are converted once, and cached by content.
"""

import glob
import json
import os
import shutil
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from oneloop.basics.progress import Working
from oneloop.data.rows.cache import alone, checksum_of, key_of
from oneloop.data.rows.find_files import Found
from oneloop.data.rows.rows import FINDINGS, unusable

_JsonRows = Sequence[Mapping[str, Any]]
_VERSION = 4  # version of the conversion; increase it if the result for the same files changes
OBJECTS = "JSON objects"  # ``id`` of the type of a column that holds objects as JSON text
_BLOCK = 64 << 20  # bytes of csv per read; a row must fit
_ROWS = 1000  # rows of a batch
_STARTED = time.time()  # of this process


def converted(found: Found, split: str, files: Sequence[Path], content: Mapping[str, Any]) -> Any:
    """Convert files once to a ``datasets.Dataset`` that is cached by content.

    Verify its checksum once per host and start; rebuild a damaged table. csv values stay text:
    ``007`` stays ``007``, an empty field is an empty text.

    Args:
        found: the data set of the files, for its kind and its path in messages.
        split: name of the split.
        files: the files of the split.
        content: their content, as :func:`oneloop.data.rows.cache.content_of` returns it.

    Raises:
        ValueError: a file cannot be read.
    """
    import pyarrow
    from datasets import Dataset

    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise ValueError(f"{found.root}: {files[0].name} is empty")
    with alone(f"tables/{key_of(_VERSION, found.kind, split, content)}.arrow") as path:
        # Try twice: a table that cannot be opened is rebuilt once.
        checksum_file = path.with_suffix(".xxh3")
        for again in (False, True):
            if path.exists() and not _intact(path, checksum_file):
                path.unlink()
            if not path.exists():
                draft = path.with_suffix(f".{os.getpid()}.draft")
                if found.kind in ("csv", "tsv"):
                    _write(_csv(filled, tabs=found.kind == "tsv"), draft)
                elif found.kind == "json":
                    _write(_json(filled), draft)
                else:
                    _by_datasets(found, filled, draft)
                checksum_file.write_text(checksum_of(draft))
                draft.replace(path)
            try:
                return Dataset.from_file(str(path))
            except (pyarrow.ArrowInvalid, OSError):
                if again:
                    raise
                path.unlink()
    raise AssertionError


def _intact(table: Path, checksum: Path) -> bool:
    """Return whether the table has its checksum.

    Skip the check if another process did it after this one started.
    """
    if not checksum.is_file():
        return False
    if checksum.stat().st_mtime > _STARTED:
        return True
    with Working("verifying the cached rows"):
        if checksum.read_text() != checksum_of(table):
            return False
    os.utime(checksum)
    return True


def _write(batches: Iterator[Any], file: Path) -> None:
    import pyarrow

    first = next(batches, None)
    if first is None:
        raise ValueError("the file has no rows")
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_stream(sink, first.schema) as writer,
    ):
        # Write small batches, so that reading a row touches little of the mapped file.
        for batch in chain([first], batches):
            for start in range(0, batch.num_rows, _ROWS):
                writer.write_batch(batch.slice(start, _ROWS))


def _csv(files: Sequence[Path], *, tabs: bool) -> Iterator[Any]:
    """Yield batches of text columns.

    In tab-separated files quotes have no meaning (IANA text/tab-separated-values).
    """
    import pyarrow
    from pyarrow import csv

    parse = csv.ParseOptions(
        delimiter="\t" if tabs else ",",
        quote_char=not tabs and '"',
        newlines_in_values=not tabs,
    )
    read = csv.ReadOptions(block_size=_BLOCK)
    names: list[str] = []  # of the columns, in the order of the first file
    for file in files:
        try:
            # Read the names of the columns.
            with csv.open_csv(file, read_options=read, parse_options=parse) as opened:
                own = opened.schema.names
            if len(set(own)) < len(own):
                twice = next(name for name in own if own.count(name) > 1)
                raise ValueError(f"{file} has two columns {twice!r}; rename one of them")
            names = names or own
            if sorted(own) != sorted(names):
                raise ValueError(
                    f"{file} has the columns {', '.join(own)}, and {files[0].name} has "
                    f"{', '.join(names)}"
                )

            # Read every column as text, without guessing types.
            text = dict.fromkeys(own, pyarrow.large_string())
            convert = csv.ConvertOptions(column_types=text, include_columns=names)
            batch = None
            with csv.open_csv(
                file, read_options=read, parse_options=parse, convert_options=convert
            ) as opened:
                for batch in opened:
                    yield batch
            if batch is None:
                raise ValueError(
                    f"{file} has no rows; remove it, or write rows below the names of the columns"
                )

            # pyarrow accepts an unclosed quote at the end, which swallows the rows after it. A last
            # block of blank lines has no rows.
            last = None
            if not tabs and batch.num_rows:
                last = batch.column(own[-1])[-1].as_py()
            if last is not None and _is_open(file, last):
                raise ValueError(
                    f"{file} ends within a quoted text: a quote is not closed; it begins with "
                    f"{last[:40]!r}"
                )
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{file} cannot be read as csv: {' '.join(str(error).split())}"
            ) from error


def _is_open(file: Path, last: str) -> bool:
    """Return whether the last value of a csv file has an unclosed quote."""
    text = b'"' + last.replace('"', '""').encode()
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(text) - 2))
        return bool(last) and stream.read().rstrip(b"\r\n").endswith(text.rstrip(b"\r\n"))


def _json(files: Sequence[Path]) -> Iterator[Any]:
    """Yield the rows of JSON Lines, or of one JSON list.

    Strings stay strings (pyarrow would convert dates), and objects become JSON text, which keeps
    their nulls.
    """
    import pyarrow
    from datasets import Features, Value

    # Read all files once for the types, so that the batches have one schema.
    columns = _Columns()
    for file, rows in _parsed(files):
        columns.add(file, rows)
    findings = FINDINGS.get()
    if findings and findings.unusable:
        raise ValueError("the values of these files were not checked, because lines are not JSON")

    # Mark the columns of JSON text, so that a task parses them.
    features = Features.from_arrow_schema(pyarrow.schema(columns.types))
    for name in columns.nested:
        features[name] = Value("string", id=OBJECTS)
    schema = features.arrow_schema

    for _, rows in _parsed(files):
        arrays = []
        for column in schema:
            values = columns.values(column.name, rows)
            arrays.append(pyarrow.array(values, column.type))
        yield pyarrow.record_batch(arrays, schema=schema)


class _Columns:
    """The columns of JSON rows, as far as they are read."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}  # Arrow type by name
        self.nested: set[str] = set()  # columns that hold objects, which become JSON text

    def add(self, file: Path, rows: _JsonRows) -> None:
        """Widen the types to these rows; raise ValueError if a column holds several types."""
        import pyarrow

        names: dict[str, None] = {}  # in order of appearance
        for row in rows:
            names.update(dict.fromkeys(row))
        for name in names:
            if any(_holds_objects(row.get(name)) for row in rows):
                self.nested.add(name)
            try:
                self.types[name] = self._widened(name, rows)
            except (pyarrow.ArrowException, OverflowError) as error:
                why = " ".join(str(error).split())
                raise ValueError(
                    f"{file}: column {name!r} must hold values of one type: {why}"
                ) from error

    def _widened(self, name: str, rows: _JsonRows) -> Any:
        """Return the type of a column that holds these rows and the earlier ones."""
        import pyarrow

        if name in self.nested:
            return pyarrow.string()
        new = pyarrow.array(self.values(name, rows)).type
        old = self.types.get(name, new)
        both = [pyarrow.schema({name: old}), pyarrow.schema({name: new})]
        return pyarrow.unify_schemas(both, promote_options="permissive").types[0]

    def values(self, name: str, rows: _JsonRows) -> list[Any]:
        """Return the values of a column; objects as JSON text, None if a row lacks the column."""
        values = [row.get(name) for row in rows]
        if name in self.nested:
            return list(map(_text, values))
        return values


def _parsed(files: Sequence[Path]) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield the parsed rows of each file, 1000 at a time, with the file.

    Raise ValueError with file and line of invalid JSON.
    """
    for file in files:
        rows = list[dict[str, Any]]()
        for number, row in _objects(file):
            if isinstance(row, str):
                row = {"text": row}
            if not isinstance(row, dict):
                where = f"{file}, line {number}"
                unusable(where, f": expected a JSON object, got {json.dumps(row)[:40]}")
                continue
            rows.append(row)
            if len(rows) == _ROWS:
                yield file, rows
                rows = []
        if rows:
            yield file, rows


def _objects(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of the line and the value, for each value of a file."""
    with file.open("rb") as lines:
        is_list = lines.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        lines.seek(0)
        # Read a list like one long line.
        for number, line in enumerate([lines.read()] if is_list else lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                at = getattr(error, "lineno", 1) if is_list else number
                unusable(f"{file}, line {at}", f": not JSON: {error}")
                continue
            for one in value if is_list else [value]:
                yield number, one


def _holds_objects(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_objects, value))
    return isinstance(value, dict)


def _text(value: Any) -> str | None:
    """Return a value as JSON text; texts and None stay."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _by_datasets(found: Found, files: Sequence[Path], draft: Path) -> None:
    """Convert files of other kinds with the readers of ``datasets``."""
    from datasets import load_dataset

    # Use a separate folder: the cache of datasets depends on path and mtime.
    work = draft.with_suffix(".work")
    load = partial(
        load_dataset,
        found.kind,
        data_files=[glob.escape(str(file)) for file in files],
        split="train",
        cache_dir=str(work),
    )
    try:
        made = load(sample_by="document") if found.kind == "text" else load()
        _write(iter(made.data.table.to_batches()), draft)
    except Exception as error:  # datasets passes on any error of its reader
        raise ValueError(_reason(error, found.root)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _reason(error: BaseException, root: Path) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{root} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
