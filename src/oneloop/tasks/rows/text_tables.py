"""Files of text rows (JSON Lines, csv) as memory-mapped Arrow.

They are converted once, and cached by content.
"""

import glob
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from oneloop.basics.files import FULL, one_line, replacing
from oneloop.basics.progress import Working
from oneloop.basics.untrusted import delete
from oneloop.tasks.rows.cache import alone, checksum_of, key_of
from oneloop.tasks.rows.column_types import Columns, JsonRows
from oneloop.tasks.rows.csv_json_lines import (
    DIALECTS,
    FileRow,
    about_one_object,
    csv_columns,
    file_rows,
)
from oneloop.tasks.rows.find_files import Found
from oneloop.tasks.rows.objects import with_fields

_Entry = tuple[int, int, int, str, str | None]  # index, file, line, reason and column of a row
_VERSION = 7  # version of the conversion; increase it if the result for the same files changes
_ROWS = 1000  # rows of a batch
_STARTED = time.time()  # of this process


@dataclass(frozen=True)
class Converted:
    """Rows of text files in Arrow, and what the conversion noticed.

    Args:
        dataset: the ``datasets.Dataset``, with nulls in place of what cannot be read.
        unreadable: index, position, reason and column of each row that cannot be read; column None:
            the whole row.
        about: how the rows seem to be stored, if the file is one JSON object; for messages.
        names: names of the files by number of the first row, if they are known.
        mixed: columns of several types, and why.
    """

    dataset: Any
    unreadable: Sequence[tuple[int, str, str, str | None]]
    about: str
    names: Mapping[int, str]
    mixed: Mapping[str, str]


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
    import pyarrow
    from datasets import Dataset

    filled = [file for file in files if file.stat().st_size]
    if not filled:
        raise ValueError(f"{found.root}: {files[0].name} is empty")
    key = key_of(_VERSION, found.kind, split, content, *fields)
    with alone(f"tables/{key}.arrow") as path:
        # Try twice: a table that cannot be opened is rebuilt once.
        checksum_file = path.with_suffix(".xxh3")
        report_file = path.with_suffix(".json")
        for again in (False, True):
            if path.exists() and not _intact(path, checksum_file):
                path.unlink()
            if not path.exists():
                _convert(found, filled, path, checksum_file, report_file, fields)
            try:
                dataset = Dataset.from_file(str(path))
                report = json.loads(report_file.read_text())
                break
            except (pyarrow.ArrowInvalid, OSError, ValueError):
                if again:
                    raise
                path.unlink()

    unreadable = []
    for index, number, line, why, column in report["unreadable"]:
        unreadable.append((index, f"{filled[number]}, line {line}", why, column))
    names = {first: str(filled[number]) for first, number in report["firsts"]}
    return Converted(dataset, unreadable, report["about"], names, report["mixed"])


def _convert(
    found: Found[Path],
    files: Sequence[Path],
    table: Path,
    checksum_file: Path,
    report_file: Path,
    fields: Sequence[str],
) -> None:
    """Write the table of these files, its checksum, and the report of the conversion."""
    draft = table.with_suffix(f".{os.getpid()}.draft")
    report = _Report(files)
    try:
        if found.kind == "json":
            _write_json(files, report, draft, fields)
        elif found.kind in DIALECTS:
            _write(_csv(files, found.kind, report), draft)
        else:
            _by_datasets(found, files, draft)
        report.write(report_file)
        with replacing(checksum_file) as file:
            file.write_text(checksum_of(draft))
        draft.replace(table)
    finally:
        draft.unlink(missing_ok=True)


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


class _Report:
    """What the conversion of files notices; it is stored next to the table."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.rows = 0
        self.firsts = dict[int, int]()  # number of the first row, by file
        self.unreadable = list[_Entry]()
        self._about = ""  # how the rows seem to be stored, if the file is one JSON object
        self.mixed: Mapping[str, str] = {}  # columns of several types, and why

    def add(self, file: int, rows: Sequence[FileRow]) -> None:
        """Number these rows of a file, and note those that cannot be read."""
        self.firsts.setdefault(file, self.rows)
        for row in rows:
            if row.values is None:
                self.unreadable.append((self.rows, file, row.line, row.why, None))
            for column, why in row.bad.items():
                self.unreadable.append((self.rows, file, row.line, why, column))
            self.rows += 1
            self._about = about_one_object(row.values or {}) if self.rows == 1 else ""

    def write(self, file: Path) -> None:
        """Write the report. Raise ValueError if no row can be read."""
        whole = [entry for entry in self.unreadable if entry[-1] is None]
        if whole and len(whole) == self.rows:
            _, number, line, why, _ = whole[0]
            raise ValueError(f"{self._files[number]}, line {line}: {why}")
        firsts = [(first, file) for file, first in self.firsts.items()]
        noticed = {
            "unreadable": self.unreadable,
            "about": self._about,
            "firsts": firsts,
            "mixed": self.mixed,
        }
        with replacing(file) as draft:
            draft.write_text(json.dumps(noticed))


def _in_batches(files: Sequence[Path], kind: str) -> Iterator[tuple[int, list[FileRow]]]:
    """Yield the number of a file and its next rows, for all files in order."""
    for number, file in enumerate(files):
        rows = file_rows(file, kind)
        while batch := list(islice(rows, _ROWS)):
            yield number, batch


def _csv(files: Sequence[Path], kind: str, report: _Report) -> Iterator[Any]:
    """Yield batches of text columns, in the order of the columns of the first file."""
    import pyarrow

    # All files must have the same columns.
    names = csv_columns(files[0], kind)
    for file in files[1:]:
        own = csv_columns(file, kind)
        if sorted(own) != sorted(names):
            raise ValueError(
                f"{file} has the columns {', '.join(own)}, and {files[0].name} has "
                f"{', '.join(names)}"
            )

    for number, rows in _in_batches(files, kind):
        report.add(number, rows)
        arrays = []
        for name in names:
            # A row that cannot be read has no values.
            values = [(row.values or {}).get(name) for row in rows]
            arrays.append(pyarrow.array(values, pyarrow.large_string()))
        yield pyarrow.record_batch(arrays, names=names)

    for number, file in enumerate(files):
        if number not in report.firsts:
            raise ValueError(
                f"{file} has no rows; remove it, or write rows below the names of the columns"
            )


def _write_json(files: Sequence[Path], report: _Report, draft: Path, fields: Sequence[str]) -> None:
    """Write the rows of JSON files.

    Strings stay strings (pyarrow would convert dates). All values of a column with objects become
    JSON text, which keeps their nulls.
    """
    import pyarrow

    # Read all files once for the types, so that the batches have one schema.
    columns = Columns()
    for rows, places in _json_batches(files, report, fields):
        columns.add(rows, places)
    schema = columns.schema()
    batches = (
        pyarrow.record_batch(columns.arrays(rows, places), schema)
        for rows, places in _json_batches(files, _Report(files), fields)
    )
    _write(batches, draft)
    report.mixed = columns.mixed


def _json_batches(
    files: Sequence[Path], report: _Report, fields: Sequence[str]
) -> Iterator[tuple[JsonRows, list[str]]]:
    """Yield rows of JSON files and their positions; add the rows to the report."""
    for number, rows in _in_batches(files, "json"):
        report.add(number, rows)
        places = [f"line {row.line} of {files[number].name}" for row in rows]
        yield [with_fields(row.values or {}, fields) for row in rows], places


def _by_datasets(found: Found[Path], files: Sequence[Path], draft: Path) -> None:
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
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno in FULL:
            raise cause from None  # of the cache
        why = one_line(cause)
        raise ValueError(
            f"{found.root} cannot be read by datasets: {type(cause).__name__}: {why}"
        ) from error
    finally:
        delete(work, inside=work.parent)
