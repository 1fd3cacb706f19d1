"""The sources of rows that ``task.data`` names, one or several, before they are opened."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oneloop.tasks.rows.find_files import Found
from oneloop.tasks.rows.image_rows import LABEL
from oneloop.tasks.rows.mixture import proportions
from oneloop.tasks.rows.remote.data_sets import check_stream, local_only
from oneloop.tasks.rows.remote_checks import Check

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
