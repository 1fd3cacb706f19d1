"""Rows of JSON Lines, CSV and tab-separated files, one at a time.

The files may be compressed. A row that cannot be read has the reason in place of values.
"""

import csv
import io
import json
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COMPRESSED = tuple(_COMPRESSIONS)
NOT_UNICODE = "is not valid Unicode text: half of a character, or bytes that are not UTF-8"
_SHOWN = 60  # characters of a row in a message
_BUFFER = 1 << 20  # bytes per read


# by words in an error of Python's ``csv`` module: the reason in the words of a CSV file
_CSV_REASONS = {
    "expected after": "characters after a closing quote; write a quote within a quoted text twice "
    '("")',
    "unexpected end of data": "the file ends within a quoted text: a quote is not closed",
}


@dataclass(frozen=True)
class FileRow:
    """A row of a file.

    Args:
        line: number of the line on which it begins, from 1.
        values: its values by column, without those that cannot be stored.
        bad: reason by column, of these values; by None if the whole row cannot be read.
    """

    line: int
    values: Mapping[str, Any]
    bad: Mapping[str | None, str] = field(default_factory=dict)


def file_rows(file: Path, kind: str) -> Iterator[FileRow]:
    """Yield the rows of a file.

    Args:
        file: the file.
        kind: ``json`` (JSON Lines, or one JSON list), or one of :data:`DIALECTS`.

    Raises:
        ValueError: the whole file cannot be read.
    """
    read = _json_rows if kind == "json" else _csv_rows
    with _opened(file) as stream:
        try:
            yield from read(file, stream, kind)
        except (OSError, EOFError) as error:  # a damaged compressed file
            raise ValueError(f"{file} cannot be read: {error}") from error


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file for buffered reading, decompressed by its ending. Reject UTF-16 text."""
    import pyarrow

    compression = _COMPRESSIONS.get(file.suffix.lower())
    with pyarrow.input_stream(str(file), compression) as raw:
        stream = io.BufferedReader(raw, _BUFFER)
        try:
            begin = stream.peek(4)[:4]
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        # Without a mark at the beginning, every second byte of ASCII text is zero.
        marked = begin.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        if marked or begin[1:4:2] == b"\0\0" or begin[0:4:2] == b"\0\0":
            raise ValueError(f"{file} is UTF-16 text; save it as UTF-8")
        yield stream


class _Tabs(csv.excel_tab):
    """Tab-separated values, in which quotes have no meaning (IANA text/tab-separated-values)."""

    quoting = csv.QUOTE_NONE
    quotechar = None


QUOTED_TSV = "quoted tsv"  # kind of tab-separated files whose quotes have their meaning in CSV
DIALECTS: Mapping[str, type[csv.Dialect]] = {
    "csv": csv.excel,
    "tsv": _Tabs,
    QUOTED_TSV: csv.excel_tab,
}


def quotes_of(files: Sequence[Path]) -> tuple[str, str]:
    """Return the kind of tab-separated files, ``tsv`` or :data:`QUOTED_TSV`, and a line about it.

    Quotes have a meaning if all files are as a csv writer makes them: each field in quotes holds a
    tab, a line break or a doubled quote, and no other field holds a quote. At least one of them
    must not be lines that are rows without quotes. The line is empty if no field begins with a
    quote.

    Args:
        files: all files of a data set.
    """
    begins = ""  # a row in which a field begins with a quote
    unlike = ""  # a row that a csv writer would write in another way
    doubtful = ""  # a row whose lines may be rows without quotes
    certain = False  # whether there is a row with quotes that is neither
    for file in files:
        read = list[str]()
        columns = 0
        try:
            with _opened(file) as stream:
                for _, values, why in _records(file, stream, QUOTED_TSV, read):
                    # Begin with another field, because a single empty one would be quoted.
                    row = "\t" + "".join(read).strip("\r\n")
                    columns = columns or len(values)
                    if '"' not in row:
                        continue
                    example = f"{row[1:_SHOWN]!r} in {file.name}"
                    if '\t"' in row:
                        begins = begins or example
                    written = io.StringIO()
                    csv.writer(written, csv.excel_tab).writerow(["", *values])
                    is_written = row == written.getvalue().strip("\r\n")

                    # A quotation may begin in the text of one row, and end in that of a later one.
                    has_break = not set("\t\r\n").isdisjoint("".join(values))
                    may_be_rows = columns > 1 and has_break and '""' not in row
                    may_be_rows &= all(line.count("\t") + 1 == columns for line in read)
                    if why or not is_written or len(values) != columns:
                        unlike = unlike or example
                    elif may_be_rows:
                        doubtful = doubtful or example
                    else:
                        certain = True
                    if begins and unlike:
                        break
        except (OSError, EOFError, ValueError):  # a quote that is not closed, or a damaged file
            begins = unlike = f"{''.join(read[:1])[:_SHOWN]!r} in {file.name}"
    if begins and unlike:
        return "tsv", f"fields keep their quotes; a csv writer would not make {unlike}"
    if doubtful and not certain:
        return "tsv", f"fields keep their quotes; each line may be a row in {doubtful}"
    if begins:
        return QUOTED_TSV, f"fields are read with quotes, as a csv writer makes them: {begins}"
    return "tsv", ""


def csv_columns(file: Path, kind: str) -> list[str]:
    """Return the names of the columns of a file.

    Args:
        file: the file.
        kind: one of :data:`DIALECTS`.

    Raises:
        ValueError: the first line cannot be read, or names a column twice.
    """
    with _opened(file) as stream:
        _, names, why = next(_records(file, stream, kind, []), (1, [], "the file is empty"))
    if why:
        raise ValueError(f"{file}, line 1: {why}")
    if names[0].startswith("sep=") and not "".join(names[1:]):
        raise ValueError(
            f"{file} begins with {names[0]!r}, a line for spreadsheets; remove it, and separate "
            "values by commas"
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{file} has two columns {name!r}; rename one of them")
        if not _is_utf8(name):
            raise ValueError(f"{file} is not UTF-8 text; save it as UTF-8")
    return names


def _csv_rows(file: Path, stream: BinaryIO, kind: str) -> Iterator[FileRow]:
    """Yield the rows below the names of the columns."""
    names: list[str] = []
    for line, values, why in _records(file, stream, kind, []):
        if not names:
            names = values
        elif why:
            yield FileRow(line, {}, {None: why})
        elif len(values) != len(names):
            why = f"{len(values)} values, and the first line names {len(names)} columns"
            yield FileRow(line, {}, {None: why})
        else:
            yield _storable(line, dict(zip(names, values, strict=True)), check=True)


def _records(
    file: Path, stream: BinaryIO, kind: str, read: list[str]
) -> Iterator[tuple[int, list[str], str]]:
    """Yield line, values and error of each record, as Python's ``csv`` module reads them.

    It is strict: after a closing quote only a separator or the end of the line may follow. Blank
    lines are left out. Raise ValueError if it is unknown where a wrong record ends. ``read`` gets
    the lines of each record.
    """
    csv.field_size_limit(sys.maxsize)
    # A byte that is not UTF-8 becomes a lone surrogate, so that its row can be named.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(_remembered(text, read), DIALECTS[kind], strict=True)
    while True:
        line = reader.line_num + 1
        read.clear()
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            why = str(error)
            for words, reason in _CSV_REASONS.items():
                why = reason if words in why else why
            # With an odd number of quotes, the record may go on in the next lines.
            is_last = len(read) == 1 and "file ends" in why
            if "".join(read).count('"') % 2 and not is_last:
                raise ValueError(
                    f"{file}, line {line}: {why}; the end of this row is unknown, so it cannot be "
                    "skipped: correct it"
                ) from None
            yield line, [], why
        else:
            if values:
                yield line, values, ""
    text.detach()


def _remembered(lines: Iterable[str], read: list[str]) -> Iterator[str]:
    """Yield lines, and add them to ``read``."""
    for line in lines:
        read.append(line)
        yield line


def _json_rows(file: Path, stream: BinaryIO, kind: str) -> Iterator[FileRow]:
    """Yield the objects of JSON Lines, or of one JSON list. A text stands for a row with it."""
    begin = stream.peek(64)[:64]  # type: ignore[attr-defined]
    is_list = begin.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    # Read a list like one long line.
    lines = [stream.read()] if is_list else stream
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            if is_list:
                at = getattr(error, "lineno", 1)
                raise ValueError(f"{file}, line {at}: not JSON: {error}") from error
            why = f"not JSON: {error}; write one object per line"
            yield FileRow(number, {}, {None: why})
            continue
        # Only an escape sequence can stand for half a character.
        check = b"\\ud" in line.lower()
        for one in value if is_list else [value]:
            if isinstance(one, str):
                one = {"text": one}
            if isinstance(one, dict):
                yield _storable(number, one, check=check)
            else:
                why = f"expected a JSON object, got {json.dumps(one)[:40]}"
                yield FileRow(number, {}, {None: why})


def about_one_object(values: Mapping[str, Any]) -> str:
    """Return where the rows of one JSON object may be, for a message; empty if it may be a row."""
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            return f", whose rows seem to be under {key!r}"
    if len(values) > 1 and all(isinstance(value, dict | list) for value in values.values()):
        return f", whose columns seem to be {', '.join(values)}"
    return ""


def _storable(line: int, values: Mapping[str, Any], *, check: bool) -> FileRow:
    """Return a row without the values that are not Unicode text; ``check``: there may be some."""
    if not check or _is_utf8(values):
        return FileRow(line, values)
    bad: dict[str | None, str] = {}
    for name, value in values.items():
        if not _is_utf8(name):
            return FileRow(line, {}, {None: f"the key {name!r} is not valid Unicode text"})
        if not _is_utf8(value):
            bad[name] = f"{name!r} {NOT_UNICODE}"
    kept = {name: value for name, value in values.items() if name not in bad}
    return FileRow(line, kept, bad)


def _is_utf8(value: Any) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
