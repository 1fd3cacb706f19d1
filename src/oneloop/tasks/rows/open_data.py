"""Open what ``task.data`` names, one source or a mixture of several, as rows by split."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from oneloop.tasks.rows.arrow_tables import hub, table_of, with_texts
from oneloop.tasks.rows.find_files import KINDS_OF_ROWS, Found, found
from oneloop.tasks.rows.image_rows import LABEL, class_folders
from oneloop.tasks.rows.mixture import Mixture, proportions
from oneloop.tasks.rows.objects import NoColumn, reject_some
from oneloop.tasks.rows.parquet import parquets
from oneloop.tasks.rows.remote.data_sets import (
    RemoteFound,
    check_stream,
    found_remotely,
    is_hub,
)
from oneloop.tasks.rows.remote.data_sets import local_only as local_only
from oneloop.tasks.rows.remote_checks import is_remote, sample_notes
from oneloop.tasks.rows.row_group_splits import check_split_by
from oneloop.tasks.rows.rows import Check, Mapped, Row, Rows, divided
from oneloop.tasks.rows.text_files import (
    STDLIB,
    TextFile,
    TextFiles,
    cut_ends,
    held_out_files,
    stdlib,
)

Data = str | list[dict[str, Any]]
"""a path or ``hf:NAME[:CONFIG][@REVISION]``; or several, each ``{"data": …, "weight": …}``"""

Unreadable = Literal["stop", "skip"]
"""what to do with a row that cannot be read"""
SplitBy = Literal["rows", "groups"]
"""what is drawn for missing splits: rows, or whole row groups of Parquet files"""


@dataclass
class Source:
    """One source of rows: a path or a hub data set."""

    where: str
    columns: Mapping[str, str]  # the task's key of each column -> its name in the data
    name: str = ""  # in a mixture
    weight: float = 1.0  # in a mixture, in any unit
    split_by: SplitBy = "rows"
    stream: bool = False  # read a hub data set in place

    optional: Sequence[str] = ()  # keys of columns that a data set need not have
    parts: dict[str, Any] = field(default_factory=dict)  # rows by split: train, validation, test
    # positions and reasons of the rows that cannot be read and are left out; None: they are errors
    skipped: list[str] | None = None
    # indices of rows to leave out, by split before dividing
    unusable: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the log
    found: Found[Any] = Found(Path(), "", {})  # its files, if they have been listed
    known: Sequence[str] = ()  # the classes of a trained model
    # by name: check of a remote row while it is read
    checks: dict[str, Check] = field(default_factory=dict)

    def origin(self, key: str, kind: Any) -> str:
        """Return where the classes in a column of this type are from, for the log."""
        column = self.columns[key]
        where = f"the column {column!r}"
        if hasattr(kind, "names"):
            where = f"the ClassLabel {column!r}"
        elif column == LABEL and self.found.classes:
            where = "the folders"
            if self.found.regrouped:
                innermost = sorted({Path(folder).name for folder in self.found.regrouped})
                where = f"the outermost folders (the innermost would be {reprlib.repr(innermost)})"
        return f"{where} of {self.where}"


def named_sources(
    data: Data,
    columns: Mapping[str, str],
    *,
    unreadable: Unreadable = "stop",
    split_by: SplitBy = "rows",
    stream: bool = False,
    remote: bool = True,
) -> list[Source]:
    """Return the sources that ``task.data`` names, unopened.

    Args:
        data: the value of ``task.data``.
        columns: default names of the columns, by key of the task.
        unreadable: stop at a row that cannot be read, or skip such rows.
        split_by: what is drawn for missing splits.
        stream: read data sets of the hub in place.
        remote: whether the task can read remote data.

    Raises:
        ValueError: ``data`` is invalid.
    """
    if isinstance(data, str):
        sources = [Source(data, columns)]
    elif data:
        sources = [_named_source(item, columns) for item in data]
    else:
        raise ValueError("task.data is an empty list; give at least one data set")
    for source in sources:
        source.skipped = [] if unreadable == "skip" else None
        source.split_by = split_by
        source.stream = stream
        if not remote:
            local_only(source.where)
    check_stream((source.where for source in sources), stream)
    if isinstance(data, str):
        return sources

    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"task.data has two entries named {name!r}; give each a different name"
            )
    proportions([source.weight for source in sources])  # raises if the weights are invalid
    return [source for source in sources if source.weight]


def _named_source(item: Any, columns: Mapping[str, str]) -> Source:
    """Return the source of one entry of a mixture."""
    if not isinstance(item, Mapping) or not isinstance(item.get("data"), str):
        raise ValueError(
            f"task.data: {item!r} has no data; write {{data: PATH, weight: 0.7}} for each"
        )
    known = {"data", "weight", "name", *columns}
    strange = sorted(set(item) - known)
    if strange:
        raise ValueError(
            f"task.data: {strange[0]!r}: unknown entry; known: {', '.join(sorted(known))}"
        )
    weight = item.get("weight", 1.0)
    if not isinstance(weight, int | float) or isinstance(weight, bool):
        raise ValueError(f"task.data: the weight {weight!r} of {item['data']!r} is not a number")
    return Source(
        where=item["data"],
        columns={key: str(item.get(key, name)) for key, name in columns.items()},
        name=str(item.get("name") or Path(item["data"]).stem),
        weight=float(weight),
    )


def opened(
    source: Source,
    *,
    held_out: float,
    window: int,
    kinds: Sequence[str] = KINDS_OF_ROWS,
    check: Callable[[Sequence[Source]], None] | None = None,
    label: str = "",
) -> Source:
    """Open a source: the rows of its columns, by split.

    Args:
        source: is changed: its ``parts`` and its ``notes``.
        held_out: share of the training rows for each missing split.
        window: memory for the row groups of Parquet files, in megabytes.
        kinds: kinds of files to look for.
        check: may reject the rows before they are split, or set ``unusable``.
        label: task key of the column of the class; each class gets training rows.

    Returns:
        The source.

    Raises:
        ValueError: the source cannot be opened, or has too few rows.
    """
    if not 0 < held_out < 0.5:
        raise ValueError(f"task.held_out {held_out} must be between 0 and 0.5; the default is 0.05")
    if window < 1:
        raise ValueError(
            f"task.window {window} must be a positive number of megabytes (default 256)"
        )
    splits = _named(source, window, kinds)
    for split, rows in splits.items():
        if not len(rows):
            raise ValueError(f"task.data {source.where!r}: the {split or 'whole'} set is empty")
    check_split_by(source.where, splits, source.split_by)

    # Check the rows before they are split, so that the splits do not depend on the check.
    source.parts = dict(splits)
    if check:
        check([source])
    if "validation" not in splits:
        training = splits["train" if "train" in splits else ""]
        # Fewer than three files cannot be three splits.
        if isinstance(training, TextFiles) and len(training) < 3:
            source.parts = cut_ends(training, held_out, splits.get("test"))
            source.notes.append(
                f"{source.where}: the end of each file is held out, because {len(training)} cannot "
                "be divided; see task.held_out"
            )
            return source
    source.parts = divided(
        splits,
        held_out,
        source.unusable,
        by_groups=source.split_by == "groups",
        label=source.columns[label] if label else "",
        text=next(filter(None, source.columns.values()), ""),
        notes=source.notes,
    )
    return source


def first_columns(
    source: Source, choices: Sequence[Mapping[str, str]], open_: Callable[[Source], Source]
) -> Source:
    """Open a source with the first choice of columns that all exist.

    Args:
        source: is changed.
        choices: the columns' names by key of the task ("": no such column).
        open_: opens the source.

    Raises:
        ValueError: no choice fits; the message lists the columns of the source.
    """
    missing = set[str]()
    available = ""
    for columns in choices:
        source.columns = columns
        try:
            return open_(source)
        except ValueError as error:
            if len(choices) == 1 or not isinstance(error.__cause__, NoColumn):
                raise
            missing.add(error.__cause__.column)
            available = str(error.__cause__).partition("; ")[2]

    # Name the choices that need the fewest keys, and their columns that are missing.
    named = [{key: name for key, name in columns.items() if name} for columns in choices]
    fewest = [one for one in named if not any(other.keys() < one.keys() for other in named)]
    needed = dict.fromkeys(chain.from_iterable(one.values() for one in fewest))
    lacking = [repr(name) for name in needed if name in missing]
    options = dict.fromkeys(f"task.{key}" for key in chain.from_iterable(named))
    raise ValueError(
        f"{source.where}: {available}; oneloop needs {' or '.join(map(' and '.join, fewest))}, and "
        f"cannot find {' and '.join(lacking)}; name other columns with {' or '.join(options)}"
    )


def _named(
    source: Source, window: int, kinds: Sequence[str], *, whole: bool = False
) -> Mapping[str, Rows]:
    """Return :func:`_rows_of` without texts that are not UTF-8.

    Add the task's key to an error about a missing column.
    """
    try:
        splits = dict(_rows_of(source, window, kinds, whole=whole))
        for split, rows in splits.items():
            # Others are checked while they are read.
            if not is_remote(rows):
                splits[split] = with_texts(rows, rows.types, source.skipped)
        return splits
    except NoColumn as error:
        # negatives_1 is the first of task.negatives
        keys = [key.rstrip("_0123456789") for key in source.columns]
        named = zip(keys, source.columns.values(), strict=True)
        options = dict.fromkeys(f"task.{key}" for key, name in named if name == error.column)
        raise ValueError(f"{error}; name another with {' or '.join(options)}") from error


def _rows_of(
    source: Source, window: int, kinds: Sequence[str], *, whole: bool
) -> Mapping[str, Rows]:
    """Return the rows by split; omit a test split that lacks a column, with a note."""
    # An earlier choice of columns may have left notes.
    source.notes.clear()
    if source.skipped:
        source.skipped.clear()
    columns = list(dict.fromkeys(name for name in source.columns.values() if name))
    where = source.where
    if where == STDLIB and "text" in kinds:
        named = {"": stdlib()} if whole else held_out_files(stdlib())
        return {split: TextFiles(files, *columns) for split, files in named.items()}
    if is_hub(where) and not source.stream:
        return hub(where[3:], columns)
    try:
        files: Any = found_remotely(where, whole=whole) or found(where, kinds, whole=whole)
    except ValueError as error:
        raise ValueError(f"task.data: {error}") from error
    source.notes += files.notes
    if files.kind == "image":
        files = replace(files, classes=class_folders(files, source.known))
    source.found = files

    splits = dict[str, Rows]()
    lacking = {}
    for split in sorted(files.parts, key="test".__eq__):  # test is the last one
        of_split = replace(files, parts={split: files.parts[split]})
        try:
            if isinstance(of_split, RemoteFound):
                splits |= of_split.rows(columns, window=window)
            elif files.kind == "parquet":
                splits |= parquets(of_split, columns, window=window)
            elif files.kind == "text":
                texts = [TextFile(path, files.root) for path in files.parts[split]]
                splits[split] = TextFiles(texts, *columns)
            else:
                splits[split] = table_of(files, split, columns, source.skipped)
        except NoColumn as error:
            lacking[split] = error

    # Only a data set with a training split can do without its test split.
    optional = {source.columns[key] for key in source.optional}
    only_test = [*lacking] == ["test"] and "train" in splits
    if only_test and lacking["test"].column not in optional:
        source.notes.append(f"{lacking['test']}: the test split is ignored")
        return splits
    reject_some([*lacking.values()], len(files.parts))
    return splits


def whole(source: Source, *, window: int, kinds: Sequence[str] = KINDS_OF_ROWS) -> Source:
    """Open a source as one set, in file order; of the hub: test, else validation, else train.

    Args:
        source: is changed: its ``parts`` have the rows as ``all``.
        window: memory for the row groups of Parquet files, in megabytes.
        kinds: kinds of files to look for.

    Returns:
        The source.

    Raises:
        ValueError: the source cannot be opened, or is empty.
    """
    splits = _named(source, window, kinds, whole=True)
    rows = next(splits[name] for name in ("", "test", "validation", "train") if name in splits)
    if not len(rows):
        raise ValueError(f"{source.where!r} is empty")
    source.parts = {"all": rows}
    return source


def notes_of(sources: Sequence[Source]) -> list[str]:
    """Return the notes of all sources for the log."""
    notes = []
    for source in sources:
        notes += source.notes
        notes += sample_notes(source.parts.values())
        if source.skipped:
            notes.append(
                f"{len(source.skipped):,} rows were skipped and listed in environment.json; the "
                f"first: {source.skipped[0]}"
            )
    return notes


def note_skipped(source: Source, rows: Any, skipped: Sequence[tuple[int, str]]) -> list[int]:
    """Add rows that were left out to those of a source, and return their indices.

    Args:
        source: is changed, if its rows may be skipped.
        rows: of one split.
        skipped: index and error of each row.
    """
    if source.skipped is None:
        return []
    source.skipped += [f"{rows.where(index)}: {why}" for index, why in skipped]
    return [index for index, _ in skipped]


def skipped_rows(sources: Sequence[Source]) -> list[str]:
    """Return position and reason of each row that is left out because it cannot be read."""
    return [row for source in sources for row in source.skipped or ()]


def sets_of(
    sources: Sequence[Source], make: Callable[[Source], Callable[[Row], Any]]
) -> dict[str, Any]:
    """Return the data sets by split; several sources are mixed.

    Args:
        sources: opened sources.
        make: returns for a source the function that converts each row to a sample.
    """
    each = []
    for source in sources:
        made = make(source)
        checks = [*source.checks.values()]
        sets = {}
        for split, rows in source.parts.items():
            skip = source.skipped is not None and is_remote(rows)
            sets[split] = Mapped(rows, made, skip=skip, checks=checks)
        each.append(sets)
    return combined(sources, each)


class SplitSets:
    """Base class of the tasks that hold their data sets by split."""

    _sets: dict[str, Any]

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: data_set for name, data_set in self._sets.items() if name != "train"}


def combined(sources: Sequence[Source], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data sets by split, mixed by the sources' weights.

    Args:
        sources: the sources.
        each: the data sets by split, of each source.
    """
    if len(sources) == 1:
        return dict(each[0])
    made = {}
    for split in ("train", "validation", "test"):
        there = [pair for pair in zip(sources, each, strict=True) if split in pair[1]]
        if there:
            sets = {source.name: of_source[split] for source, of_source in there}
            made[split] = Mixture(sets, [source.weight for source, _ in there])
    return made
