"""Types of the columns of JSON rows and image metadata, to store them in Arrow."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from oneloop.tasks.rows.objects import OBJECTS, as_json

JsonRows = Sequence[Mapping[str, Any]]
_DEEPEST = 30  # most lists within each other; Arrow allows about twice as many
_SHOWN = 40  # characters of a value in a message


class Columns:
    """The columns of rows, as far as the rows are known, to store them in Arrow."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}  # Arrow type by name
        self.objects = set[str]()  # columns with objects, which become JSON text
        self.mixed: dict[str, str] = {}  # columns of several types, and why; they become nulls

    def add(self, rows: JsonRows, places: Sequence[object]) -> None:
        """Widen the types to these rows.

        Args:
            rows: the rows.
            places: position of each row, for messages.
        """
        import pyarrow

        # The names are in order of appearance.
        for name in dict.fromkeys(chain.from_iterable(rows)):
            values = [row.get(name) for row in rows]
            self.types.setdefault(name, pyarrow.null())
            if _holds_objects(values):
                self.objects.add(name)
            if name in self.objects:
                self.types[name] = pyarrow.string()
            else:
                self._used(name, values, partial(self._widen, name), places)

    def _used(
        self,
        name: str,
        values: Sequence[Any],
        use: Callable[[Sequence[Any]], Any],
        places: Sequence[object],
    ) -> Any:
        """Return the result of ``use``; if it fails, nulls, and note the first value that fails.

        Args:
            name: of the column.
            values: its values.
            use: takes values.
            places: see :meth:`add`.
        """
        import pyarrow

        wrong = pyarrow.ArrowException, OverflowError
        try:
            return use(values)
        except wrong:
            for value, place in zip(values, places, strict=True):
                try:
                    use([value])
                except wrong:
                    shown = json.dumps(value, default=str)[:_SHOWN]
                    why = f"{shown} in {place} does not fit the type {self.types[name]} of others"
                    self.mixed.setdefault(name, f"{why}; write one type, such as text")
                    break
        return pyarrow.nulls(len(values), self.types[name])

    def _widen(self, name: str, values: Sequence[Any]) -> None:
        """Set the type of a column to one that holds these values and the earlier ones."""
        import pyarrow

        try:
            new = pyarrow.array(values).type
        except OverflowError:
            # Values that do not fit are found when they are written.
            new = pyarrow.uint64()
        old = self.types[name]
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
        for name in self.objects:
            features[name] = Value("string", id=OBJECTS)
        return features.arrow_schema

    def arrays(self, rows: JsonRows, places: Sequence[object]) -> list[Any]:
        """Return these rows as Arrow arrays, one for each column; see :meth:`add`."""
        import pyarrow

        arrays = []
        for name, kind in self.types.items():
            values = [row.get(name) for row in rows]
            if name in self.objects:
                values = list(map(as_json, values))
            arrays.append(self._used(name, values, partial(pyarrow.array, type=kind), places))
        return arrays


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
