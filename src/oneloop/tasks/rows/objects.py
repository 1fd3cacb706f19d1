"""Objects in columns of rows, as JSON text or Arrow structs, and their fields by dotted names."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

OBJECTS = "JSON objects"  # ``id`` of the type of a column that holds its values as JSON text
_LEVELS = 50  # most objects within each other


class Written(dict[str, Any]):
    """An object of JSON text, in which the user wrote each null. A table adds nulls."""


def as_json(value: Any) -> str | None:
    """Return a value as JSON text. A text, too: it differs from an object that it may describe."""
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def value_of(stored: Any, kind: Any) -> Any:
    """Return a stored value as the user wrote it: objects, and texts beside objects.

    Args:
        stored: the value as it is in the table.
        kind: type of the column.
    """
    if stored is None or getattr(kind, "id", None) != OBJECTS:
        return stored
    return json.loads(stored, object_hook=Written)


def flattened(values: Mapping[str, Any], levels: int = _LEVELS) -> dict[str, Any]:
    """Return a row with the fields of its objects by dotted names, such as ``translation.en``.

    A column of that name comes first, then a field of the object with the longest name.

    Args:
        values: the row.
        levels: objects within each other; those that are deeper stay.
    """
    made = {}
    for name in sorted(values, key=len):
        value = values[name]
        if isinstance(value, Mapping) and levels:
            for field, inner in flattened(value, levels - 1).items():
                made[f"{name}.{field}"] = inner
    return {**made, **values}


def with_fields(values: Mapping[str, Any], fields: Sequence[str]) -> Mapping[str, Any]:
    """Return a row with more columns: these fields of its objects, if it has them.

    Args:
        values: the row.
        fields: dotted names.
    """
    if not fields:
        return values
    known = flattened(values)
    return {**values, **{field: known[field] for field in fields if field in known}}


class NoColumn(ValueError):
    """The rows have no column of that name.

    Args:
        name: name of the rows in the message.
        column: the missing column.
        known: the columns that exist.
        about: more about them.
    """

    def __init__(self, name: str, column: str, known: Sequence[str], about: str = "") -> None:
        super().__init__(f"{name} has no column {column!r}; it has {', '.join(known)}{about}")
        self.column = column


def reject_some(lacking: Sequence[NoColumn], files: int) -> None:
    """Raise an error if files lack a column. It would be left out of all if only some have it.

    Args:
        lacking: an error for each file, or for each split, that lacks a column.
        files: number of all files or splits.
    """
    if lacking and len(lacking) == files:
        raise lacking[0]
    if lacking:
        raise ValueError(
            f"only some files have the column {lacking[0].column!r}: {lacking[0]}; add it to all "
            "(an empty value means none)"
        )


def down_to(
    table: Any,
    column: str,
    where: str,
    known: Sequence[str] = (),
    about: str = "",
    **level: int,
) -> Any:
    """Return a table with this column; its objects are replaced by their fields, if it needs one.

    ``translation.en`` is the field ``en`` of ``translation``, unless a column has that name.

    Args:
        table: has the method ``flatten``, and the names of its columns.
        column: name of the column.
        where: name of the rows in messages.
        known: more columns, for messages.
        about: more about the columns, for messages.
        level: arguments with which ``flatten`` replaces the outermost objects.

    Raises:
        ValueError: the column is missing, or is there twice.
    """
    names = [*known]
    while column not in table.column_names:
        before = table.column_names
        names += before
        table = table.flatten(**level)
        if table.column_names == before:
            raise NoColumn(where, column, [*dict.fromkeys(names)], about)
    if table.column_names.count(column) > 1:
        raise ValueError(f"{where} has two columns {column!r}; rename one of them")
    return table
