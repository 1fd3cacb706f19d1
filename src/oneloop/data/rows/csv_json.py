"""Files of text rows (JSON Lines, csv) as memory-mapped Arrow, converted once and cached by
content."""

import glob
import json
import os
import shutil
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from oneloop.basics.progress import Working
from oneloop.data.rows.cache import alone, checksum_of, key_of
from oneloop.data.rows.find_files import Found
from oneloop.data.rows.rows import FINDINGS, unusable

_VERSION = 4  # version of the conversion; increase it if the result for the same files changes
OBJECTS = "JSON objects"  # ``id`` of the type of a column that holds objects as JSON text
_BLOCK = 64 << 20  # bytes of csv per read; a row must fit
_ROWS = 1000
_STARTED = time.time()


def converted(found: Found, split: str, files: Sequence[Path], content: Mapping[str, Any]) -> Any:
    """Convert files once to a ``datasets.Dataset`` that is cached by content. Verify its checksum
    once per host and start; rebuild a damaged table. csv values stay text: ``007`` stays ``007``,
    an empty field is an empty text. Raises ValueError if a file cannot be read."""
    import pyarrow
    from datasets import Dataset

    if not (filled := [file for file in files if file.stat().st_size]):
        raise ValueError(f"{found.root}: {files[0].name} is empty")
    with alone(f"tables/{key_of(_VERSION, found.kind, split, content)}.arrow") as path:
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
                path.unlink()  # damaged: rebuild it
    raise AssertionError


def _intact(table: Path, checksum: Path) -> bool:
    """Return whether the table has its checksum; skip the check if another process did it after
    this one started."""
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
        for batch in chain([first], batches):
            for start in range(0, batch.num_rows, _ROWS):
                writer.write_batch(batch.slice(start, _ROWS))


def _csv(files: Sequence[Path], *, tabs: bool) -> Iterator[Any]:
    """Yield batches of text columns. In tab-separated files quotes have no meaning (IANA
    text/tab-separated-values)."""
    import pyarrow
    from pyarrow import csv

    parse = csv.ParseOptions(
        delimiter="\t" if tabs else ",", quote_char=not tabs and '"', newlines_in_values=not tabs
    )
    names: list[str] = []
    for file in files:
        try:
            read = csv.ReadOptions(block_size=_BLOCK)
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
            text = csv.ConvertOptions(
                column_types=dict.fromkeys(own, pyarrow.large_string()), include_columns=names
            )
            with csv.open_csv(
                file, read_options=read, parse_options=parse, convert_options=text
            ) as opened:
                batch = None
                for batch in opened:
                    yield batch
            if batch is None:
                raise ValueError(
                    f"{file} has no rows; remove it, or write rows below the names of the columns"
                )
            if not tabs and _is_open(file, batch.column(own[-1])[-1].as_py() or ""):
                begins = f"it begins with {batch.column(own[-1])[-1].as_py()[:40]!r}"
                raise ValueError(
                    f"{file} ends within a quoted text: a quote is not closed; {begins}"
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
    """Yield the rows of JSON Lines, or of one JSON list. Strings stay strings (pyarrow would
    convert dates), and objects become JSON text, which keeps their nulls."""
    import pyarrow
    from datasets import Features, Value

    kinds: dict[str, Any] = {}
    nested: set[str] = set()

    def column(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        values = [row.get(name) for row in rows]
        return [_text(value) for value in values] if name in nested else values

    for file, rows in _parsed(files):
        for name in dict.fromkeys(name for row in rows for name in row):
            nested |= {name} if any(_holds_objects(row.get(name)) for row in rows) else set()
            try:
                kind = (
                    pyarrow.string() if name in nested else pyarrow.array(column(name, rows)).type
                )
                both = [pyarrow.schema({name: one}) for one in (kinds.get(name, kind), kind)]
                either = (
                    kind
                    if name in nested
                    else pyarrow.unify_schemas(both, promote_options="permissive").types[0]
                )
                kinds[name] = either
            except (pyarrow.ArrowException, OverflowError) as error:
                why = " ".join(str(error).split())
                raise ValueError(
                    f"{file}: column {name!r} must hold values of one type: {why}"
                ) from error
    if (findings := FINDINGS.get()) and findings.unusable:
        raise ValueError("the values of these files were not checked, because lines are not JSON")
    features = Features.from_arrow_schema(pyarrow.schema(kinds))
    schema = Features(
        features | {name: Value("string", id=OBJECTS) for name in nested}
    ).arrow_schema
    for _, rows in _parsed(files):
        yield pyarrow.record_batch(
            [pyarrow.array(column(one.name, rows), one.type) for one in schema], schema=schema
        )


def _parsed(files: Sequence[Path]) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield the parsed rows of each file, 1000 at a time. Raises ValueError with file and line of
    invalid JSON."""
    for file in files:
        rows = list[dict[str, Any]]()
        for number, row in _objects(file):
            row = {"text": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                unusable(
                    f"{file}, line {number}",
                    f": expected a JSON object, got {json.dumps(row)[:40]}",
                )
                continue
            rows.append(row)
            if len(rows) == _ROWS:
                yield file, rows
                rows = []
        if rows:
            yield file, rows


def _objects(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        whole = lines.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        lines.seek(0)
        for number, line in enumerate([lines.read()] if whole else lines, start=1):
            try:
                if line.strip():
                    value = json.loads(line.decode("utf-8-sig"))
                    yield from ((number, one) for one in (value if whole else [value]))
            except ValueError as error:
                at = getattr(error, "lineno", 1) if whole else number
                unusable(f"{file}, line {at}", f": not JSON: {error}")


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_objects, value)))


def _text(value: Any) -> str | None:
    return (
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _by_datasets(found: Found, files: Sequence[Path], draft: Path) -> None:
    from datasets import load_dataset

    options = {"sample_by": "document"} if found.kind == "text" else {}
    # a separate folder: the cache of datasets depends on path and mtime
    work = draft.with_suffix(".work")
    try:
        named = [glob.escape(str(file)) for file in files]
        made = load_dataset(
            found.kind, data_files=named, split="train", cache_dir=str(work), **options
        )
        _write(iter(made.data.table.to_batches()), draft)
    except Exception as error:  # datasets passes on any error of its reader
        raise ValueError(_reason(error, found.root)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _reason(error: BaseException, root: Path) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{root} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
