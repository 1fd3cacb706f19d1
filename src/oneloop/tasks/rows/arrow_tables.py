"""Rows in memory-mapped Arrow files of ``datasets``.

They come from JSON Lines, csv and Arrow files, image folders, and data sets of the hub.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.tasks.rows.cache import (
    alone,
    cached_json,
    content_of,
    key_of,
    numbers_key,
    rows_content,
)
from oneloop.tasks.rows.column_types import reject_mixed
from oneloop.tasks.rows.csv_json_lines import NOT_UNICODE, about_one_object
from oneloop.tasks.rows.find_files import SPLITS, Found, split_of
from oneloop.tasks.rows.image_rows import image_rows, metadata_files
from oneloop.tasks.rows.objects import down_to, flattened, value_of
from oneloop.tasks.rows.parquet_files import decoded_column, is_wanted, plain_features
from oneloop.tasks.rows.rows import FINDINGS, Row, drop_rows
from oneloop.tasks.rows.text_tables import Converted, converted

_BATCH = 1000  # rows per Arrow array of a column


class Table:
    """The rows of a ``datasets.Dataset``.

    Args:
        dataset: the data set.
        content: its fingerprint.
        names: names of its files in messages, by number of the first row.
        numbers: number of each row in the files; None: these are all rows.
    """

    def __init__(
        self,
        dataset: Any,
        content: Mapping[str, Any],
        names: Mapping[int, str],
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        self.dataset = dataset
        self.types = dict(plain_features(dataset.features))
        self.content = content
        self.names = names
        self._numbers = np.arange(len(dataset)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.dataset[int(index)]
        kinds = self.dataset.features
        return {name: value_of(value, kinds[name]) for name, value in row.items()}

    def where(self, index: int) -> str:
        row = int(self._numbers[index])
        first = max(first for first in self.names if first <= row)
        return f"{self.names[first]}, row {row - first}"

    def fingerprint(self) -> dict[str, Any]:
        return {"length": len(self), "columns": sorted(self.types), **self.content}

    def values(self, column: str) -> Iterator[Any]:
        """Yield the column as Arrow arrays, in row order; objects as JSON text."""
        plain = self.dataset.with_format("arrow", columns=[column])
        for batch in plain.iter(_BATCH):
            yield decoded_column(batch[column].combine_chunks(), self.types[column])

    def select(self, indices: NDArray[np.int64]) -> "Table":
        content = {**self.content, "rows": numbers_key(indices)}
        return Table(self.dataset.select(indices), content, self.names, self._numbers[indices])


def table_of(
    found: Found[Path],
    split: str,
    columns: Sequence[str] | None,
    skipped: list[str] | None = None,
) -> Table:
    """Return the rows of one split; JSON Lines and CSV are converted once, in the cache.

    Args:
        found: the files.
        split: name of the split.
        columns: the columns to keep; None: all, except those of images.
        skipped: gets the positions and reasons of the rows that cannot be read, which are left
            out; None: they are an error.

    Raises:
        ValueError: a file or row cannot be read, or a column is missing.
    """
    files = found.parts[split]
    name = str(files[0] if len(files) == 1 else found.root)
    described = [*files]
    if found.kind == "image":
        described += metadata_files(found)
    content = content_of(described, found.root)
    # Results for labels that are not the names of the images' own folders are cached separately.
    if found.regrouped:
        content["classes"] = key_of(found.regrouped)

    # Objects of JSON have no types here, so their fields become columns.
    fields = list[str]()
    if found.kind == "json":
        fields = sorted(column for column in columns or () if "." in column)
    made: Converted | None = None
    with quiet(), Working(f"reading {len(files):,} {found.kind} files"):
        if found.kind == "image":
            made = Converted(image_rows(found, split, columns or []))
        elif found.kind == "arrow":
            made = _mapped(files)
        if made is None:
            made = converted(found, split, files, content, fields)
    if split:
        content["part"] = split

    # Keep the columns that are read.
    dataset = made.dataset
    if columns is None:
        columns = [*dataset.column_names, *made.mixed]
    reject_mixed(made.mixed, columns, name)
    about = ""
    if found.kind == "json" and len(dataset):
        first = Table(dataset, {}, {0: name})[0]
        about = about_one_object(first) if len(dataset) == 1 else ""
        if fields:
            inner = sorted(flattened(first).keys() - first.keys())
            about = "".join(f", {field}" for field in inner) + about
    dataset = with_columns(dataset, columns, name, about)
    table = Table(dataset, content, {0: name, **made.names})

    # Values of columns that are not read do not count.
    bad: dict[int, tuple[str, str]] = {}
    for index, where, why, column in made.unreadable:
        if column is None or any(is_wanted(read, [column]) for read in columns):
            bad.setdefault(index, (where, why))
    readable: Table = _readable(table, bad, skipped)
    return readable


def with_texts(rows: Any, columns: Iterable[str], skipped: list[str] | None) -> Any:
    """Return the rows without those that have bytes that are not UTF-8 in place of texts.

    The rows are checked once, and the result is cached by their content.

    Args:
        rows: the rows.
        columns: the columns that are checked.
        skipped: gets the positions and reasons of the rows that are left out; None: they are an
            error.

    Raises:
        ValueError: there is such a row, and ``skipped`` is None; or all rows are such rows.
    """
    texts = [column for column in columns if "string" in str(rows.types[column])]
    key = key_of(rows_content(rows), texts)
    found = cached_json(f"unicode/{key}.json", lambda: _wrong(rows, texts))
    bad = {index: (rows.where(index), f"{column!r} {NOT_UNICODE}") for index, column in found}
    return _readable(rows, bad, skipped)


def _wrong(rows: Any, columns: Sequence[str]) -> list[tuple[int, str]]:
    """Return index and column of each text that is not UTF-8."""
    found = []
    for column in columns:
        before = 0
        for array in rows.values(column):
            try:
                array.validate(full=True)
            except ValueError:
                for index, value in enumerate(array, start=before):
                    try:
                        value.as_py()
                    except UnicodeDecodeError:
                        found.append((index, column))
            before += len(array)
    return found


def _readable(rows: Any, bad: Mapping[int, tuple[str, str]], skipped: list[str] | None) -> Any:
    """Return the rows without those that cannot be read, or raise an error about them.

    Args:
        rows: the rows.
        bad: position and reason of each row that cannot be read, by its index.
        skipped: see :func:`with_texts`.
    """
    if not bad:
        return rows
    reasons = [f"{where}: {why}" for where, why in bad.values()]
    findings = FINDINGS.get()
    if findings is not None:
        findings.left_out += len(bad)
        findings.unusable += bad.values()
    elif skipped is None:
        raise ValueError(
            f"{len(bad):,} rows cannot be read, the first: {reasons[0]}; correct it, or set "
            "task.unreadable skip to train without such rows"
        )
    elif len(bad) == len(rows):
        raise ValueError(f"no row can be read, the first: {reasons[0]}; correct it")
    else:
        skipped += reasons
    return drop_rows(rows, [*bad])


def _mapped(files: Sequence[Path]) -> Converted | None:
    """Memory-map Arrow files that ``datasets`` wrote; return None if one has another format."""
    import pyarrow
    from datasets import Dataset, concatenate_datasets

    shards = []
    names = {}
    rows = 0
    try:
        for file in files:
            shards.append(Dataset.from_file(str(file)))
            names[rows] = str(file)
            rows += len(shards[-1])
        return Converted(concatenate_datasets(shards), names)
    except (pyarrow.ArrowInvalid, OSError):
        return None


def with_columns(dataset: Any, columns: Sequence[str], name: str, about: str = "") -> Any:
    """Return the data set with only these columns, images and sounds as stored.

    Args:
        dataset: a ``datasets.Dataset``.
        columns: names of the columns.
        name: name of the data set in messages.
        about: more about its columns, for the message about a missing one.

    Raises:
        ValueError: a column is missing.
    """
    from datasets import Audio, Image, concatenate_datasets

    if not columns:
        return dataset  # whose rows are counted: datasets has none without columns
    flat = dataset.column_names
    fields = []
    for column in columns:
        if column not in flat:
            # A format, which lists columns, would hide the fields of objects.
            objects = [one for one in flat if isinstance(dataset.features[one], dict)]
            parents = sorted((one for one in objects if is_wanted(column, [one])), key=len)
            found = dataset.select_columns(parents[-1:]).with_format(None)
            found = down_to(found, column, name, flat, about, max_depth=2)
            fields.append(found.select_columns([column]))
    dataset = dataset.select_columns([column for column in columns if column in flat])
    if fields:
        dataset = concatenate_datasets([dataset, *fields], axis=1)
    for column, feature in dataset.features.items():
        if isinstance(feature, Image | Audio):
            dataset = dataset.cast_column(column, type(feature)(decode=False))
    return dataset


@contextmanager
def quiet() -> Iterator[None]:
    """Silence ``datasets``.

    Its progress bars appear on every rank, and it logs errors that it also raises.
    """
    import datasets

    shown = datasets.is_progress_bar_enabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def hub(name: str, columns: Sequence[str]) -> dict[str, Table]:
    """Open a data set of the hub by its own splits.

    Args:
        name: ``NAME[:CONFIG][@REVISION]``.
        columns: the columns to keep.

    Raises:
        ValueError: the data set, its training split or a column is missing.
    """
    from datasets import load_dataset_builder

    if not name.strip(":@ "):
        raise ValueError(
            "task.data hf: has no data set name; write hf:NAME, hf:NAME:CONFIG or hf:NAME@REVISION"
        )

    # Other processes wait for the download, and then read the local copy.
    wanted, _, revision = name.partition("@")
    path, _, config = wanted.partition(":")
    with alone(f"hub/{key_of(name)}"), quiet(), Working(f"loading {name}"):
        try:
            builder = load_dataset_builder(path, config or None, revision=revision or None)
            builder.download_and_prepare()
            loaded = builder.as_dataset()
        except Exception as error:  # datasets passes on any error of its file system
            raise ValueError(
                f"data set {name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    # A word is enough (train1), if no other split has it, and none has exactly its name.
    words = [split_of(split) for split in loaded]
    named = {split_of(split): split for split in loaded if words.count(split_of(split)) == 1}
    named.pop("", None)
    named |= {SPLITS[split]: split for split in loaded if split in SPLITS}
    if "train" not in named:
        raise ValueError(
            f"data set {name!r} has no training split; its splits are {', '.join(loaded)}"
        )

    splits = {}
    for split, hub_split in named.items():
        content = {"hub": path, "config": config, "commit": builder.hash, "split": hub_split}
        kept = with_columns(loaded[hub_split], columns, f"data set {name!r}")
        splits[split] = Table(kept, content, {0: f"{name} {hub_split}"})
    return splits
