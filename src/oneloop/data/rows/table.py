"""Rows that ``datasets`` holds in memory-mapped arrow files: json lines, csv, arrow, image folders, the hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.data.rows.cache import alone, cache_folder, content_of, key_of, numbers_key
from oneloop.data.rows.found import PARTS, Found
from oneloop.data.rows.images import image_rows, metadata_of
from oneloop.data.rows.rows import Row

_BATCH = 1000


class Table:
    """Rows of a ``datasets.Dataset``.

    Args:
        dataset: the rows; only the columns that are wanted.
        content: what they are, for :meth:`fingerprint`.
        name: for messages.
    """

    def __init__(self, dataset: Any, content: Mapping[str, Any], name: str) -> None:
        self.dataset, self.content, self.name = dataset, content, name

    @property
    def types(self) -> Mapping[str, Any]:
        return dict(self.dataset.features)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.dataset[int(index)]
        return row

    def where(self, index: int) -> str:
        chosen = self.dataset._indices
        at = index if chosen is None else chosen.column(0)[int(index)].as_py()
        return f"{self.name}, row {at}"

    def fingerprint(self) -> dict[str, Any]:
        return {"length": len(self), "columns": sorted(self.types), **self.content}

    def values(self, column: str) -> Iterator[Any]:
        """The column as arrow arrays, in the order of the rows."""
        plain = self.dataset.with_format("arrow", columns=[column])
        for start in range(0, len(self), _BATCH):
            yield plain[start : start + _BATCH][column].combine_chunks()

    def chosen(self, indices: NDArray[np.int64], *, but: bool = False, place: Path | None = None) -> Table:
        rows = np.delete(np.arange(len(self)), indices) if but else indices
        dataset = self.dataset.select(rows, indices_cache_file_name=str(place) if place else None)
        return Table(dataset, {**self.content, "rows": numbers_key(indices, but=but)}, self.name)


def tables(there: Found, columns: Sequence[str]) -> dict[str, Table]:
    """The files' rows by part; json lines and csv are converted once, and kept in the cache.

    Raises:
        ValueError: a file cannot be read, or has no such column.
    """
    return {part: _table(there, part, files, columns) for part, files in there.parts.items()}


def _table(there: Found, part: str, files: Sequence[Path], columns: Sequence[str]) -> Table:
    name = str(files[0] if len(files) == 1 else there.root)
    content = content_of([*files, *(metadata_of(there) if there.kind == "image" else [])], there.root)
    with quiet(), Working(f"reading {len(files):,} {there.kind} files"):
        dataset = image_rows(there, part) if there.kind == "image" else None
        if there.kind == "arrow":
            dataset = _mapped(files)
        if dataset is None:
            dataset = _converted(there, part, files, content)
    return Table(with_columns(dataset, columns, name), {**content, **({"part": part} if part else {})}, name)


def _mapped(files: Sequence[Path]) -> Any:
    """Arrow files as ``datasets`` writes them, in place; None where one is of another kind."""
    import pyarrow
    from datasets import Dataset, concatenate_datasets

    try:
        return concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    except (pyarrow.ArrowInvalid, OSError):
        return None


def _converted(there: Found, part: str, files: Sequence[Path], content: Mapping[str, Any]) -> Any:
    """What ``datasets`` made of the files, once. It is kept by content: a copy or a touch makes nothing anew."""
    from datasets import Dataset, load_dataset

    options: dict[str, Any] = {}
    if there.kind == "csv":
        options = {"keep_default_na": False}  # a text of "NA" is a text
        if files[0].suffix.lower() == ".tsv":
            options["delimiter"] = "\t"
    if there.kind == "text":
        options["sample_by"] = "document"
    with alone(f"tables/{key_of(there.kind, part, content)}.arrow") as place:
        if not place.exists():
            try:
                made = load_dataset(
                    there.kind,
                    data_files=[glob.escape(str(file)) for file in files],
                    split="train",
                    cache_dir=str(cache_folder() / "datasets"),
                    **options,
                )
            except Exception as error:  # datasets raises whatever its reader raised
                raise ValueError(_reason(error, there.root)) from error
            draft = place.with_suffix(f".{os.getpid()}.draft")
            _write(made, draft)
            draft.replace(place)
            for file in {entry["filename"] for entry in made.cache_files}:
                Path(file).unlink(missing_ok=True)
        return Dataset.from_file(str(place))


def _write(dataset: Any, file: Path) -> None:
    import pyarrow

    table = dataset.data.table
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, dataset.features.arrow_schema) as writer:
        for batch in table.to_batches(max_chunksize=1000):
            writer.write_batch(batch)


def _reason(error: BaseException, root: Path) -> str:
    """The innermost cause: what the reader found wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{root} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"


def with_columns(dataset: Any, columns: Sequence[str], name: str) -> Any:
    """The data set with these columns alone; images and sounds are left as they are stored.

    Raises:
        ValueError: it has no such column.
    """
    from datasets import Audio, Image

    if missing := [column for column in columns if column not in dataset.column_names]:
        raise ValueError(no_column(name, missing[0], dataset.column_names))
    dataset = dataset.select_columns(list(columns))
    for column, feature in dataset.features.items():
        if isinstance(feature, Image | Audio):
            dataset = dataset.cast_column(column, type(feature)(decode=False))
    return dataset


def no_column(name: str, column: str, known: Sequence[str]) -> str:
    """The message that says so."""
    return f"{name} has no column {column!r}; it has {', '.join(known)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars of ``datasets``, which know nothing of ranks."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def hub(name: str, columns: Sequence[str]) -> dict[str, Table]:
    """A set of the hub by its own parts: ``NAME[:CONFIG][@REVISION]``.

    Raises:
        ValueError: it cannot be had, has no part to train on, or no such column.
    """
    from datasets import load_dataset_builder

    wanted, _, revision = name.partition("@")
    path, _, config = wanted.partition(":")
    with alone(f"hub/{key_of(name)}"), quiet(), Working(f"loading {name}"):
        try:
            builder = load_dataset_builder(path, config or None, revision=revision or None)
            builder.download_and_prepare()
            splits = builder.as_dataset()
        except Exception as error:  # datasets raises whatever its file system raised
            raise ValueError(f"data set {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not any(PARTS.get(split) == "train" for split in splits):
        raise ValueError(f"data set {name!r} has no training part; its splits are {', '.join(splits)}")
    parts = {}
    for split, rows in splits.items():
        if part := PARTS.get(split):
            content = {"hub": path, "config": config, "commit": builder.hash, "split": split}
            parts[part] = Table(with_columns(rows, columns, f"data set {name!r}"), content, f"{name} {split}")
    return parts
