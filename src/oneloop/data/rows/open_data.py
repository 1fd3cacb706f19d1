"""Open what ``task.data`` names, one source or a mixture of several, as rows by split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneloop.data.mixture import Mixture, proportions
from oneloop.data.rows.arrow_tables import NoColumn, hub, tables
from oneloop.data.rows.find_files import KINDS_OF_ROWS, Found, found
from oneloop.data.rows.parquet import parquets
from oneloop.data.rows.rows import Mapped, Row, Rows, divided

Data = str | list[dict[str, Any]]
"""a path or ``hf:NAME[:CONFIG][@REVISION]``; or several, each ``{"data": …, "weight": …}``"""


@dataclass
class Source:
    """One source of rows: a path or a hub data set."""

    where: str
    columns: Mapping[str, str]  # the task's key of each column -> its name in the data
    name: str = ""
    weight: float = 1.0
    parts: dict[str, Any] = field(default_factory=dict)  # rows by split: train, validation, test
    # indices of rows to leave out, by split before dividing
    unusable: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the log


def named_sources(data: Data, columns: Mapping[str, str]) -> list[Source]:
    """Return the sources that ``task.data`` names, unopened; ``columns`` are the default column
    names by key. Raises ValueError if ``data`` is invalid."""
    if isinstance(data, str):
        return [Source(data, columns)]
    if not data:
        raise ValueError("task.data is an empty list; give at least one data set")
    sources = []
    for item in data:
        known = {"data", "weight", "name", *columns}
        if not isinstance(item, Mapping) or not isinstance(item.get("data"), str):
            raise ValueError(
                f"task.data: {item!r} has no data; write {{data: PATH, weight: 0.7}} for each"
            )
        if strange := set(item) - known:
            raise ValueError(
                f"task.data: {sorted(strange)[0]!r}: unknown entry; known: "
                f"{', '.join(sorted(known))}"
            )
        weight = item.get("weight", 1.0)
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise ValueError(
                f"task.data: the weight {weight!r} of {item['data']!r} is not a number"
            )
        own = {key: str(item.get(key, name)) for key, name in columns.items()}
        name = str(item.get("name") or Path(item["data"]).stem)
        sources.append(Source(item["data"], own, name, float(weight)))
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"task.data has two entries named {twice!r}; give each a different name")
    proportions([source.weight for source in sources])
    return [source for source in sources if source.weight]


def opened(
    source: Source,
    *,
    held_out: float,
    window: int,
    kinds: Sequence[str] = KINDS_OF_ROWS,
    check: Callable[[Sequence[Source]], None] | None = None,
) -> Source:
    """Open a source: the rows of its columns, by split. ``held_out`` is the share of the training
    rows for each missing split. ``check`` may reject the rows before they are split, or set
    ``unusable``. ``window`` is in megabytes. Raises ValueError."""
    checked(held_out, window)
    splits = _named(source, window, kinds)
    for split, rows in splits.items():
        if not len(rows):
            raise ValueError(f"task.data {source.where!r}: the {split or 'whole'} set is empty")
    source.parts = dict(splits)
    if check:
        check([source])
    source.parts = divided(splits, held_out, source.unusable)
    return source


def first_columns(
    source: Source, choices: Sequence[Mapping[str, str]], open_: Callable[[Source], Source]
) -> Source:
    """Open a source with ``open_`` and the first of ``choices`` whose columns all exist ("": no
    such column). Raises ValueError with the columns of the source if none fits."""
    missing = list[str]()
    for columns in choices:
        source.columns = columns
        try:
            return open_(source)
        except ValueError as error:
            if not isinstance(error.__cause__, NoColumn):
                raise
            available, missing = (
                str(error.__cause__).partition("; ")[2],
                [*missing, error.__cause__.column],
            )
    wanted = [[key for key, name in columns.items() if name] for columns in choices]
    fewest = [
        " and ".join(keys) for keys in wanted if not any(set(other) < set(keys) for other in wanted)
    ]
    keys = " or ".join(f"task.{key}" for key in dict.fromkeys(key for one in wanted for key in one))
    needed = [
        choices[at][key]
        for at, keys_ in enumerate(wanted)
        for key in keys_
        if " and ".join(keys_) in fewest
    ]
    lacking = " and ".join(repr(name) for name in dict.fromkeys(missing) if name in needed)
    lacks = f"oneloop needs {' or '.join(fewest)}, and cannot find {lacking}"
    raise ValueError(f"{source.where}: {available}; {lacks}; name other columns with {keys}")


def _named(
    source: Source, window: int, kinds: Sequence[str], *, whole: bool = False
) -> Mapping[str, Rows]:
    """Return :func:`_rows_of`; add the task's key to an error about a missing column."""
    try:
        return _rows_of(source, window, kinds, whole=whole)
    except NoColumn as error:
        named = [
            key.rstrip("_0123456789")
            for key, name in source.columns.items()
            if name == error.column
        ]
        # negatives_1 is the first of task.negatives
        keys = " or ".join(f"task.{key}" for key in dict.fromkeys(named))
        raise ValueError(f"{error}; name another with {keys}") from error


def _rows_of(
    source: Source, window: int, kinds: Sequence[str], *, whole: bool
) -> Mapping[str, Rows]:
    """Return the rows by split; omit a test split that lacks a column, with a note."""
    columns = list(dict.fromkeys(name for name in source.columns.values() if name))
    if source.where.startswith("hf:"):
        return hub(source.where[3:], columns)
    try:
        files = found(source.where, kinds, whole=whole)
    except ValueError as error:
        raise ValueError(f"task.data: {error}") from error
    splits: dict[str, Rows] = {}
    test = files.parts.pop("test", None) if "train" in files.parts else None
    for group in ({**files.parts}, {"test": test} if test else {}):
        files = Found(files.root, files.kind, group)
        try:
            splits |= (
                parquets(files, columns, window=window)
                if files.kind == "parquet"
                else tables(files, columns)
            )
        except NoColumn as error:
            if "test" not in group:
                raise
            source.notes.append(f"{error}: the test split is ignored")
    return splits


def whole(source: Source, *, window: int, kinds: Sequence[str] = KINDS_OF_ROWS) -> Source:
    """Open a source as one set, in file order; of the hub: test, else validation, else train.
    Raises ValueError."""
    splits = _named(source, window, kinds, whole=True)
    rows = next(splits[name] for name in ("", "test", "validation", "train") if name in splits)
    if not len(rows):
        raise ValueError(f"{source.where!r} is empty")
    source.parts = {"all": rows}
    return source


def notes_of(sources: Sequence[Source]) -> list[str]:
    """Return the notes of all sources for the log."""
    return [note for source in sources for note in source.notes]


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
    """Return the data sets by split: ``make(source)`` converts each row to a sample; several
    sources are mixed."""
    return combined(
        sources,
        [{split: Mapped(rows, make(s)) for split, rows in s.parts.items()} for s in sources],
    )


def combined(sources: Sequence[Source], each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data sets by split, mixed by the sources' weights; ``each`` holds the data sets of
    each source."""
    if len(sources) == 1:
        return dict(each[0])
    made = {}
    for split in ("train", "validation", "test"):
        having = [
            (source, sets[split])
            for source, sets in zip(sources, each, strict=True)
            if split in sets
        ]
        if having:
            made[split] = Mixture(
                {s.name: dataset for s, dataset in having}, [s.weight for s, _ in having]
            )
    return made
