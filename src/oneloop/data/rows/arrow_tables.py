"""Rows that ``datasets`` holds in memory-mapped arrow files: json lines, csv, arrow, image folders, the hub."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.progress import Working
from oneloop.data.rows.cache import alone, content_of, key_of, numbers_key
from oneloop.data.rows.csv_json import converted
from oneloop.data.rows.find_files import PARTS, Found, image_rows, metadata_of
from oneloop.data.rows.rows import Row

_BATCH = 1000


class Table:
    """Rows of a ``datasets.Dataset``; ``content`` is the fingerprint."""

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

    def chosen(self, indices: NDArray[np.int64], *, but: bool = False, place: Path | None = None) -> "Table":
        rows = np.delete(np.arange(len(self)), indices) if but else indices
        dataset = self.dataset.select(rows, indices_cache_file_name=str(place) if place else None)
        return Table(dataset, {**self.content, "rows": numbers_key(indices, but=but)}, self.name)


def tables(there: Found, columns: Sequence[str]) -> dict[str, Table]:
    """Return the files' rows by split; json lines and csv are converted once, in the cache. Raises ValueError if a file
    or column is missing."""
    return {part: _table(there, part, files, columns) for part, files in there.parts.items()}


def _table(there: Found, part: str, files: Sequence[Path], columns: Sequence[str]) -> Table:
    name = str(files[0] if len(files) == 1 else there.root)
    content = content_of([*files, *(metadata_of(there) if there.kind == "image" else [])], there.root)
    with quiet(), Working(f"reading {len(files):,} {there.kind} files"):
        dataset = image_rows(there, part) if there.kind == "image" else None
        if there.kind == "arrow":
            dataset = _mapped(files)
        if dataset is None:
            dataset = converted(there, part, files, content)
    return Table(with_columns(dataset, columns, name), {**content, **({"part": part} if part else {})}, name)


def _mapped(files: Sequence[Path]) -> Any:
    """Arrow files as ``datasets`` writes them, in place; None where one is of another kind."""
    import pyarrow
    from datasets import Dataset, concatenate_datasets

    try:
        return concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    except (pyarrow.ArrowInvalid, OSError):
        return None


def with_columns(dataset: Any, columns: Sequence[str], name: str) -> Any:
    """Return the data set with only these columns, images and sounds as stored. Raises ValueError if one is missing."""
    from datasets import Audio, Image

    for column in columns:
        if dataset.column_names.count(column) != 1:
            raise no_column(name, column, dataset.column_names)
    dataset = dataset.select_columns(list(columns))
    for column, feature in dataset.features.items():
        if isinstance(feature, Image | Audio):
            dataset = dataset.cast_column(column, type(feature)(decode=False))
    return dataset


class NoColumn(ValueError):
    """Rows without a column of that name."""

    def __init__(self, name: str, column: str, known: Sequence[str]) -> None:
        super().__init__(f"{name} has no column {column!r}; it has {', '.join(known)}")
        self.column = column


def no_column(name: str, column: str, known: Sequence[str]) -> ValueError:
    """The error that says so; or that there are two of the name."""
    if column in known:
        return ValueError(f"{name} has two columns {column!r}; rename one of them")
    return NoColumn(name, column, known)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars of ``datasets``, which know nothing of ranks, and what it logs of errors that it raises too."""
    import datasets

    shown, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def hub(name: str, columns: Sequence[str]) -> dict[str, Table]:
    """Open a data set of the hub by its own splits: ``NAME[:CONFIG][@REVISION]``. Raises ValueError if it, its training
    split or a column is missing."""
    from datasets import load_dataset_builder

    if not name.strip(":@ "):
        raise ValueError("task.data hf: has no data set name; write hf:NAME, hf:NAME:CONFIG or hf:NAME@REVISION")
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
