"""Types of the columns of JSON rows and image metadata, to store them in Arrow."""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oneloop.tasks.rows.objects import OBJECTS, as_json

# Whole numbers between two of these borders fit into the same types: int64, uint64 and float64.
_BORDERS = (
    -(2**63) - 1,
    -(2**53) - 1,
    -1,
    2**53,
    2**63 - 1,
    2**64 - 1,
)
_DEEPEST = 30  # most lists within each other; Arrow allows about twice as many
_SHOWN = 40  # characters of a value in a message

_Examples = dict[Any, tuple[Any, object]]
"""the first value of each shape in a column, and its position"""


@dataclass(frozen=True)
class Columns:
    """How the columns of rows are stored in Arrow.

    Args:
        schema: the Arrow schema; it marks the columns of JSON text.
        objects: columns with objects, whose values become JSON text.
        mixed: columns of several types, and why; they are not stored.
    """

    schema: Any
    objects: Collection[str] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)

    def batch(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """Return rows as a ``pyarrow.RecordBatch``."""
        import pyarrow

        stored = []
        for row in rows:
            texts = {name: as_json(row.get(name)) for name in self.objects}
            stored.append({**row, **texts})
        return pyarrow.RecordBatch.from_pylist(stored, self.schema)


def columns_of(rows: Iterable[tuple[Mapping[str, Any], object]]) -> Columns:
    """Return the columns that hold all values of these rows.

    Args:
        rows: each row, and its position for messages.
    """
    import pyarrow
    from datasets import Features, Value

    # Values of one shape have one type, so that one of them is enough.
    examples: dict[str, _Examples] = {}
    for row, place in rows:
        for name, value in row.items():
            of_column = examples.setdefault(name, {})
            of_column.setdefault(_shape(value), (value, place))

    objects = set[str]()
    types = {}
    mixed = {}
    for name, of_column in examples.items():
        if any(_holds_objects(value) for value, _ in of_column.values()):
            objects.add(name)
            types[name] = pyarrow.string()
            continue

        # Widen the type to one example after the other.
        kind = pyarrow.null()
        values = []
        for value, place in of_column.values():
            values.append(value)
            try:
                kind = _arrow_type(values)
            except (pyarrow.ArrowException, OverflowError):
                shown = json.dumps(value, default=str)[:_SHOWN]
                why = f"{shown} in {place} does not fit the type {kind} of others"
                mixed[name] = f"{why}; write one type, such as text"
                break
        else:
            types[name] = kind

    features = Features.from_arrow_schema(pyarrow.schema(types))
    for name in objects:
        features[name] = Value("string", id=OBJECTS)
    return Columns(features.arrow_schema, objects, mixed)


def _shape(value: Any) -> Any:
    """Return what decides the Arrow type of a value, and whether it fits the type of others."""
    if isinstance(value, list):
        return frozenset(map(_shape, value))
    if type(value) is int:
        return bisect_left(_BORDERS, value)
    if value is None or isinstance(value, str | float | bool | dict):
        return type(value)
    import pyarrow

    return pyarrow.scalar(value).type  # in metadata of images


def _arrow_type(values: Sequence[Any]) -> Any:
    """Return the type of an Arrow array of these values. Raise an error of pyarrow if none fits."""
    import pyarrow

    try:
        kind = pyarrow.array(values).type
    except OverflowError:
        kind = pyarrow.array(values, pyarrow.uint64()).type
    if str(kind).count("list<") > _DEEPEST:
        raise pyarrow.ArrowInvalid(f"lists are nested more than {_DEEPEST} times")
    return kind


def reject_mixed(mixed: Mapping[str, str], columns: Iterable[str], where: str) -> None:
    """Raise ValueError if one of the columns holds values of several types.

    Args:
        mixed: see :class:`Columns`.
        columns: names of the columns that are read.
        where: name of the rows in the message.
    """
    for column in columns:
        if column in mixed:
            raise ValueError(
                f"{where}: column {column!r} must hold values of one type: {mixed[column]}"
            )


def _holds_objects(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_objects, value))
    return isinstance(value, dict)
