"""Types of the columns of JSON rows and image metadata, to store them in Arrow."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from oneloop.tasks.rows.objects import OBJECTS, as_json

JsonRows = Sequence[Mapping[str, Any]]
MIXED = "must hold values of one type"  # begin of the ``id`` of a column with several types
_DEEPEST = 30  # most lists within each other; Arrow allows about twice as many
Use = Callable[[Any], Any]
_SHOWN = 40  # characters of a value in a message


class Misfit(Exception):
    """Values of a column do not fit the type that other rows need: a large integer and a float.

    Args:
        column: its name.
        why: the reason.
    """

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"{column}: {why}")
        self.column = column
        self.why = why


class Columns:
    """The columns of rows, as far as the rows are known, to store them in Arrow."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}  # Arrow type by name
        # columns that become JSON text, by name: "" for objects, an error for several types
        self.nested: dict[str, str] = {}

    def add(self, rows: JsonRows, places: Sequence[object]) -> None:
        """Widen the types to these rows.

        Args:
            rows: the rows.
            places: position of each row, for messages.
        """
        names: dict[str, None] = {}  # in order of appearance
        for row in rows:
            names.update(dict.fromkeys(row))
        for name in names:
            if any(_holds_objects(row.get(name)) for row in rows):
                self.nested.setdefault(name, "")
            try:
                self._used(name, rows, partial(self._widen, name), places)
            except Misfit as error:
                self.mix(name, error.why)

    def mix(self, name: str, why: str) -> None:
        """Make a column JSON text, which no task can read; the others can be read."""
        import pyarrow

        self.nested[name] = f"{MIXED}: {why}"
        self.types[name] = pyarrow.string()

    def _used(self, name: str, rows: JsonRows, use: Use, places: Sequence[object]) -> Any:
        """Return the result of ``use`` for a column; raise Misfit at the first value that fails.

        Args:
            name: of the column.
            rows: the rows.
            use: takes values.
            places: see :meth:`add`.
        """
        import pyarrow

        values = self._values(name, rows)
        wrong = pyarrow.ArrowException, OverflowError
        try:
            return use(values)
        except wrong:
            # Try again with the first value, the first two, and so on.
            for index in range(len(values)):
                try:
                    use(values[: index + 1])
                except wrong:
                    break
        shown = json.dumps(values[index], default=str)[:_SHOWN]
        others = f" the type {self.types[name]} of others" if name in self.types else ""
        why = f"{shown} in {places[index]} does not fit{others}; write one type, such as text"
        raise Misfit(name, why)

    def _widen(self, name: str, values: Sequence[Any]) -> None:
        """Set the type of a column to one that holds these values and the earlier ones."""
        import pyarrow

        if name in self.nested:
            self.types[name] = pyarrow.string()
            return
        try:
            new = pyarrow.array(values).type
        except OverflowError:
            # Values that do not fit are found when they are written.
            new = pyarrow.uint64()
        old = self.types.get(name, new)
        if {old, new} == {pyarrow.int64(), pyarrow.uint64()}:
            old = new = pyarrow.uint64()
        both = [pyarrow.schema({name: old}), pyarrow.schema({name: new})]
        kind = pyarrow.unify_schemas(both, promote_options="permissive").types[0]
        if str(kind).count("list<") > _DEEPEST:
            raise pyarrow.ArrowInvalid(f"lists are nested more than {_DEEPEST} times")
        self.types[name] = kind

    def schema(self) -> Any:
        """Return the Arrow schema; it marks the columns of JSON text."""
        import pyarrow
        from datasets import Features, Value

        features = Features.from_arrow_schema(pyarrow.schema(self.types))
        for name, about in self.nested.items():
            features[name] = Value("string", id=about or OBJECTS)
        return features.arrow_schema

    def arrays(self, rows: JsonRows, places: Sequence[object]) -> list[Any]:
        """Return these rows as Arrow arrays, one for each column; see :meth:`add`."""
        import pyarrow

        arrays = []
        for name, kind in self.types.items():
            arrays.append(self._used(name, rows, partial(pyarrow.array, type=kind), places))
        return arrays

    def _values(self, name: str, rows: JsonRows) -> list[Any]:
        """Return the values of a column, None if a row lacks it; beside objects, as JSON text."""
        values = [row.get(name) for row in rows]
        return list(map(as_json, values)) if name in self.nested else values


def _holds_objects(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_objects, value))
    return isinstance(value, dict)
