"""Names of classes: which Unicode forms are one class, and lines for the log about them."""

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.tasks.columns import columns_of, element_type
from oneloop.tasks.rows.image_rows import LABEL, composed
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import is_remote


def name_of(kind: Any, value: Any) -> str:
    """Return the class name of a label; ``ClassLabel`` stores its number.

    Args:
        kind: type of the column.
        value: the label.
    """
    return str(kind.names[value]) if hasattr(kind, "names") else str(value)


def classes_listed(
    names: Sequence[str], sources: Sequence[Source], key: str, kinds: Mapping[str, Any]
) -> str:
    """Return a line about the classes: their number, the first names, and where they are from.

    Args:
        names: of the classes.
        sources: the data sets.
        key: task key of the label column.
        kinds: type of this column, by source.
    """
    origins = []
    for source in sources:
        if source.columns[key]:
            origins.append(_origin(source, source.columns[key], kinds.get(source.name)))
    return f"{len(names):,} classes: {reprlib.repr(names)}, from {' and '.join(origins)}"


def _origin(source: Source, column: str, kind: Any) -> str:
    folders = source.found.classes if source.found and column == LABEL else {}
    if not folders:
        where = "the ClassLabel" if hasattr(kind, "names") else "the column"
        return f"{where} {column!r} of {source.where}"

    # Name the classes that the innermost folders would give.
    if all(folder.name == its_class.name for folder, its_class in folders.items()):
        return f"the folders of {source.where}"
    innermost = sorted({folder.name for folder in folders})
    return (
        f"the outermost folders of {source.where} that differ (the innermost folders would give "
        f"{reprlib.repr(innermost)})"
    )


class Spellings:
    """The names of classes. Names that Unicode composes to the same text are one class.

    macOS decomposes the names of files: ``é`` is ``e`` and an accent. A class has the composed name
    if it is spelled in several ways, and else the name that it has in the data.

    Args:
        labels: the labels of all splits; those of the training split first.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._names: dict[str, str] = {}  # of the class, by composed label
        self.merged: dict[str, None] = {}  # composed labels of several spellings
        for label in labels:
            form = composed(label)
            if self._names.setdefault(form, label) != label:
                self._names[form] = form
                self.merged[form] = None

    def name(self, label: str) -> str:
        """Return the name of the class of a label."""
        return self._names[composed(label)]

    def notes(self, sources: Sequence[Source], key: str) -> list[str]:
        """Return lines about classes of several spellings, and about names that look alike.

        Args:
            sources: the data sets.
            key: task key of the label column.
        """
        notes = []
        if self.merged:
            notes.append(
                f"classes that are spelled in several Unicode forms are one class: "
                f"{', '.join(self.merged)}"
            )
        alike: dict[str, list[str]] = {}
        for form in self._names:
            alike.setdefault("".join(form.split()).casefold(), []).append(form)
        similar = {name for names in alike.values() if len(names) > 1 for name in names}
        if similar:
            counts = _counts(sources, key, similar)
            shown = ", ".join(f"{name!r}{counts.get(name, '')}" for name in sorted(similar))
            notes.append(f"classes whose names differ only by blanks or case: {shown}")
        return notes


def _counts(sources: Sequence[Source], key: str, names: set[str]) -> dict[str, str]:
    """Return how often these labels occur, in all splits; nothing for remote rows."""
    counts = Counter[str]()
    for _, _, rows, column in columns_of(sources, key):
        if is_remote(rows):
            return {}
        kind = element_type(rows.types[column]) or rows.types[column]
        for array in rows.values(column):
            labels = array if element_type(rows.types[column]) is None else array.flatten()
            for entry in labels.value_counts().to_pylist():
                if entry["values"] is not None:
                    counts[composed(name_of(kind, entry["values"]))] += entry["counts"]
    return {name: f" ({count:,} rows)" for name, count in counts.items()}
