"""Files of rows (JSON Lines, csv) as memory-mapped Arrow.

They are converted once, and cached by content.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from oneloop.basics.files import replacing
from oneloop.basics.progress import Working
from oneloop.tasks.rows.cache import alone, checksum_of, key_of
from oneloop.tasks.rows.column_types import Columns, columns_of
from oneloop.tasks.rows.csv_json_lines import csv_columns, file_rows
from oneloop.tasks.rows.find_files import Found
from oneloop.tasks.rows.objects import with_fields

_VERSION = 9  # version of the conversion; increase it if the result for the same files changes
_ROWS = 1000  # rows of a batch
_STARTED = time.time()  # of this process


@dataclass(frozen=True)
class Converted:
    """Rows of files in Arrow, and what the conversion noticed.

    Args:
        dataset: the ``datasets.Dataset``, with nulls in place of what cannot be read.
        names: names of the files by number of the first row, if they are known.
        unreadable: index, position, reason and column of each row that cannot be read; column None:
            the whole row.
        mixed: columns of several types, and why.
    """

    dataset: Any
    names: Mapping[int, str] = field(default_factory=dict)
    unreadable: Sequence[tuple[int, str, str, str | None]] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)


def converted(
    found: Found[Path],
    split: str,
    files: Sequence[Path],
    content: Mapping[str, Any],
    fields: Sequence[str] = (),
) -> Converted:
    """Convert files once to a ``datasets.Dataset`` that is cached by content.

    Verify its checksum once per host and start; rebuild a damaged table. CSV values stay text:
    ``007`` stays ``007``, an empty field is an empty text.

    Args:
        found: the data set of the files, for its kind and its path in messages.
        split: name of the split.
        files: the files of the split.
        content: their content, as :func:`oneloop.tasks.rows.cache.content_of` returns it.
        fields: dotted names of fields of objects in JSON Lines, which become columns.

    Raises:
        ValueError: a file cannot be read.
    """
    from datasets import Dataset

    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise ValueError(f"{found.root}: {files[0].name} is empty")
    key = key_of(_VERSION, found.kind, split, content, *fields)
    with alone(f"tables/{key}.arrow") as path:
        report_file = path.with_suffix(".json")
        report = _intact(path, report_file) or _convert(
            found.kind, filled, path, report_file, fields
        )
        dataset = Dataset.from_file(str(path))

    names = {first: str(filled[number]) for number, first in enumerate(report["firsts"])}
    unreadable = []
    for index, number, line, why, column in report["unreadable"]:
        unreadable.append((index, f"{filled[number]}, line {line}", why, column))
    return Converted(dataset, names, unreadable, report["mixed"])


def _intact(table: Path, report_file: Path) -> dict[str, Any] | None:
    """Return the report of a conversion; None if it or the table is missing or damaged.

    Skip the checksum of the table if another process verified it after this one started.
    """
    try:
        report: dict[str, Any] = json.loads(report_file.read_text())
        if report["bytes"] != table.stat().st_size:
            return None
        if report_file.stat().st_mtime <= _STARTED:
            with Working("verifying the cached rows"):
                if report["checksum"] != checksum_of(table):
                    return None
            os.utime(report_file)
    except (OSError, ValueError, KeyError):
        return None
    return report


def _convert(
    kind: str, files: Sequence[Path], table: Path, report_file: Path, fields: Sequence[str]
) -> dict[str, Any]:
    """Write the table of these files; store and return what the conversion noticed."""
    draft = table.with_suffix(f".{os.getpid()}.draft")
    report: dict[str, Any] = {"firsts": [], "unreadable": [], "mixed": {}}
    try:
        if kind == "arrow":
            _write(_arrow_batches(files), draft)
        else:
            columns = _columns(files, kind, fields)
            report["mixed"] = columns.mixed
            _write(_batches(files, kind, columns, fields, report), draft)
        report |= {"bytes": draft.stat().st_size, "checksum": checksum_of(draft)}
        draft.replace(table)
        with replacing(report_file) as file:
            file.write_text(json.dumps(report))
    finally:
        draft.unlink(missing_ok=True)
    return report


def _columns(files: Sequence[Path], kind: str, fields: Sequence[str]) -> Columns:
    """Return the columns of all files, so that their batches have one schema.

    Strings stay strings (pyarrow would convert dates). All values of a column with objects become
    JSON text, which keeps their nulls.
    """
    import pyarrow

    if kind == "json":
        return columns_of(_values_and_places(files, fields))
    names = csv_columns(files[0], kind)
    for file in files[1:]:
        columns = csv_columns(file, kind)
        if sorted(columns) != sorted(names):
            raise ValueError(
                f"{file} has the columns {', '.join(columns)}, and {files[0].name} has "
                f"{', '.join(names)}"
            )
    return Columns(pyarrow.schema([(name, pyarrow.large_string()) for name in names]))


def _values_and_places(
    files: Sequence[Path], fields: Sequence[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the values and the position of each row of JSON files."""
    for file in files:
        for row in file_rows(file, "json"):
            yield with_fields(row.values, fields), f"line {row.line} of {file.name}"


def _batches(
    files: Sequence[Path],
    kind: str,
    columns: Columns,
    fields: Sequence[str],
    report: Mapping[str, Any],
) -> Iterator[Any]:
    """Yield the rows of files as Arrow batches; report those that cannot be read.

    Raise ValueError if a CSV file has no rows, or if no row can be read.
    """
    total = 0
    for number, file in enumerate(files):
        report["firsts"].append(total)
        rows = file_rows(file, kind)
        while batch := [*islice(rows, _ROWS)]:
            for index, row in enumerate(batch, start=total):
                for column, why in row.bad.items():
                    report["unreadable"].append((index, number, row.line, why, column))
            total += len(batch)
            yield columns.batch(with_fields(row.values, fields) for row in batch)
        if kind != "json" and total == report["firsts"][-1]:
            raise ValueError(
                f"{file} has no rows; remove it, or write rows below the names of the columns"
            )

    broken = [entry for entry in report["unreadable"] if entry[-1] is None]
    if broken and len(broken) == total:
        _, number, line, why, _ = broken[0]
        raise ValueError(f"{files[number]}, line {line}: {why}")


def _arrow_batches(files: Sequence[Path]) -> Iterator[Any]:
    """Yield the batches of Arrow files in the format for random access."""
    import pyarrow

    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file} cannot be read as Arrow: {error}") from error


def _write(batches: Iterable[Any], file: Path) -> None:
    """Write batches as an Arrow stream, in small ones: reading a row touches little of the file."""
    import pyarrow

    writer = None
    with pyarrow.OSFile(str(file), "wb") as sink:
        for batch in batches:
            writer = writer or pyarrow.ipc.new_stream(sink, batch.schema)
            writer.write_table(pyarrow.Table.from_batches([batch]), _ROWS)
        if writer is None:
            raise ValueError("the file has no rows")
        writer.close()
