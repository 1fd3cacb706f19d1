"""Open what ``task.data`` names, one source or a mixture of several, as rows by split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oneloop.task_protocol.protocol import Task
from oneloop.tasks.rows.arrow_tables import hub, tables, with_texts
from oneloop.tasks.rows.find_files import KINDS_OF_ROWS, Found, found
from oneloop.tasks.rows.image_rows import class_folders
from oneloop.tasks.rows.mixture import Mixture
from oneloop.tasks.rows.objects import NoColumn
from oneloop.tasks.rows.parquet import parquets
from oneloop.tasks.rows.remote.data_sets import RemoteFound, found_remotely, is_hub, local_only
from oneloop.tasks.rows.remote_checks import is_remote, sample_notes, while_reading
from oneloop.tasks.rows.row_group_splits import check_split_by, divided_by_groups
from oneloop.tasks.rows.rows import Mapped, Row, Rows, divided
from oneloop.tasks.rows.sources import Data, Source, SplitBy, Unreadable, named_sources

__all__ = [
    "Data",
    "Source",
    "SplitBy",
    "SplitSets",
    "Unreadable",
    "checked",
    "combined",
    "first_columns",
    "local_only",
    "named_sources",
    "note_skipped",
    "notes_of",
    "opened",
    "sets_of",
    "skipped_rows",
    "whole",
]


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
    checked(held_out, window)
    splits = _named(source, window, kinds)
    for split, rows in splits.items():
        if not len(rows):
            raise ValueError(f"task.data {source.where!r}: the {split or 'whole'} set is empty")
    check_split_by(source.where, splits, source.split_by)

    # Check the rows before they are split, so that the splits do not depend on the check.
    source.parts = dict(splits)
    if check:
        check([source])
    if source.split_by == "groups" and "validation" not in splits:
        source.parts = divided_by_groups(splits, held_out, source.unusable)
        return source
    source.parts = divided(
        splits,
        held_out,
        source.unusable,
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
    missing: dict[str, None] = {}  # columns, in order of the attempts
    available = ""
    for columns in choices:
        source.columns = columns
        try:
            return open_(source)
        except ValueError as error:
            if not isinstance(error.__cause__, NoColumn):
                raise
            missing[error.__cause__.column] = None
            available = str(error.__cause__).partition("; ")[2]

    # Name the choices that need the fewest keys, and their columns that are missing.
    wanted = [[key for key, name in columns.items() if name] for columns in choices]
    fewest = []
    needed = set[str]()
    for columns, keys in zip(choices, wanted, strict=True):
        if not any(set(other) < set(keys) for other in wanted):
            fewest.append(" and ".join(keys))
            needed.update(columns[key] for key in keys)
    lacking = [repr(name) for name in missing if name in needed]
    options = dict.fromkeys(f"task.{key}" for keys in wanted for key in keys)
    raise ValueError(
        f"{source.where}: {available}; oneloop needs {' or '.join(fewest)}, and cannot find "
        f"{' and '.join(lacking)}; name other columns with {' or '.join(options)}"
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
        keys: dict[str, None] = {}
        for key, name in source.columns.items():
            if name == error.column:
                # negatives_1 is the first of task.negatives
                keys[f"task.{key.rstrip('_0123456789')}"] = None
        raise ValueError(f"{error}; name another with {' or '.join(keys)}") from error


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

    def of(parts: dict[str, list[Any]]) -> Mapping[str, Rows]:
        chosen = replace(files, parts=parts)
        try:
            return _of_files(chosen, columns, source, window)
        except NoColumn as error:
            # A column that only some files have would be left out of all.
            if _has_column(files, error.column, source, window):
                raise ValueError(_only_some(error)) from None
            raise

    # Only a data set with a training split can do without its test split.
    if "train" not in files.parts or "test" not in files.parts:
        return of(files.parts)
    test = files.parts["test"]
    splits = dict(of({split: part for split, part in files.parts.items() if split != "test"}))
    try:
        splits |= _of_files(replace(files, parts={"test": test}), columns, source, window)
    except NoColumn as error:
        if error.column in [source.columns[key] for key in source.optional]:
            raise ValueError(_only_some(error)) from None
        source.notes.append(f"{error}: the test split is ignored")
    return splits


def _only_some(error: NoColumn) -> str:
    return (
        f"only some files have the column {error.column!r}: {error}; add it to all (an empty "
        "value means none)"
    )


def _of_files(
    files: Found[Any], columns: Sequence[str], source: Source, window: int
) -> Mapping[str, Rows]:
    """Return the rows of files by split."""
    if isinstance(files, RemoteFound):
        return files.rows(columns, window=window)
    if files.kind == "parquet":
        return parquets(files, columns, window=window)
    return tables(files, columns, skipped=source.skipped)


def _has_column(files: Found[Any], column: str, source: Source, window: int) -> bool:
    """Return whether a file, or the files of a split that are read together, have a column."""
    for split, several in files.parts.items():
        each = [[file] for file in several] if files.kind == "parquet" else [several]
        for group in each:
            try:
                _of_files(replace(files, parts={split: group}), [column], source, window)
                return True
            except NoColumn:
                continue
    return False


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


def checked(held_out: float, window: int) -> None:
    """Raise ValueError if the share or the window (megabytes) is out of range."""
    if not 0 < held_out < 0.5:
        raise ValueError(f"task.held_out {held_out} must be between 0 and 0.5; the default is 0.05")
    if window < 1:
        raise ValueError(
            f"task.window {window} must be a positive number of megabytes (default 256)"
        )


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
        made = while_reading(make(source), source.checks)
        sets = {}
        for split, rows in source.parts.items():
            sets[split] = Mapped(rows, made, skip=is_remote(rows) and source.skipped is not None)
        each.append(sets)
    return combined(sources, each)


class SplitSets(Task):
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
        sets = {}
        weights = []
        for source, of_source in zip(sources, each, strict=True):
            if split in of_source:
                sets[source.name] = of_source[split]
                weights.append(source.weight)
        if sets:
            made[split] = Mixture(sets, weights)
    return made
