"""Objects in columns of rows, as JSON text or Arrow structs, and their fields by dotted names."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OBJECTS = "JSON objects"  # ``id`` of the type of a column that holds its values as JSON text


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
    try:
        return json.loads(stored, object_hook=Written)
    except (ValueError, RecursionError):
        return stored  # an older version stored a text beside objects unchanged


def with_texts(array: Any, kind: Any) -> Any:
    """Return a stored column in which a text beside objects is that text, and not its JSON.

    The draw of validation rows depends on it, as it did before texts were stored as JSON.

    Args:
        array: Arrow array of the column.
        kind: type of the column.
    """
    import pyarrow

    if getattr(kind, "id", None) != OBJECTS:
        return array
    values = []
    for stored in array.to_pylist():
        value = value_of(stored, kind)
        values.append(value if isinstance(value, str) else stored)
    return pyarrow.array(values, array.type)


def path_of(fields: Iterable[Any], column: str) -> list[Any]:
    """Return the Arrow fields from a column of the table to the one with this name.

    ``translation.en`` is the field ``en`` of ``translation``, unless a column has that name.

    Args:
        fields: an Arrow schema, or an Arrow struct.
        column: the name.

    Returns:
        The fields, of which the last one has the values; empty if there is no such column.
    """
    import pyarrow

    known = {field.name: field for field in fields}
    if column in known:
        return [known[column]]
    for name in sorted(known, key=len, reverse=True):
        if column.startswith(f"{name}.") and pyarrow.types.is_struct(known[name].type):
            inner = path_of(known[name].type, column[len(name) + 1 :])
            if inner:
                return [known[name], *inner]
    return []


def names_of(fields: Iterable[Any], prefix: str = "") -> list[str]:
    """Return the names of columns and of the fields in them, for messages.

    Args:
        fields: an Arrow schema, or an Arrow struct.
        prefix: begin of each name.
    """
    import pyarrow

    names = []
    for field in fields:
        names.append(prefix + field.name)
        if pyarrow.types.is_struct(field.type):
            names += names_of(field.type, f"{prefix}{field.name}.")
    return names


def with_fields(values: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return a row of JSON with fields of its objects as more columns; it may lack some.

    Args:
        values: the row.
        columns: dotted names.
    """
    made = dict(values)
    for column in columns:
        for value in _field(values, column):
            made[column] = value
    return made


def _field(values: Any, column: str) -> list[Any]:
    """Return the value of a dotted name in a list; empty if there is none."""
    if not isinstance(values, Mapping):
        return []
    if column in values:
        return [values[column]]
    for name in sorted(values, key=len, reverse=True):
        if column.startswith(f"{name}."):
            found = _field(values[name], column[len(name) + 1 :])
            if found:
                return found
    return []
