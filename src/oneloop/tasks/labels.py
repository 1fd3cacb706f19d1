"""The classes of a column of labels."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from oneloop.data.rows.csv_json import OBJECTS
from oneloop.data.rows.open_data import Source
from oneloop.tasks.columns import columns_of, inside, rejected, values_of

Numbers = Mapping[str, Callable[[Any], int]]  # the number of a label's class, for each source by name


def classes_of(sources: Sequence[Source], key: str, *, lists: bool = False) -> tuple[list[str], Numbers]:
    """Return the class names of a label column (text, whole numbers, yes/no, or ``ClassLabel``), and what maps a label
    to its number. ``lists``: a row has several. A test split without labels is removed. Raises ValueError for a missing
    label, one that is not in the training split, or another type."""
    trained: set[str] = set()
    seen: dict[tuple[str, str], set[str]] = {}
    kinds: dict[str, Any] = {}
    for source, part, rows, column in columns_of(sources, key):
        kind = inside(rows.types[column]) if lists else rows.types[column]
        if part == "test" and not lists and _unlabelled(rows, column, kind):
            del source.parts["test"]
            source.notes.append(f"{source.where}: no row of the test split has a label, so it is not evaluated")
            continue
        if not _is_label(kind):
            wanted = f"{'a list of labels' if lists else 'one label'} for each row is needed (text or a whole number)"
            raise rejected(source, key, rows.types[column], wanted)
        if getattr(kinds.setdefault(source.name, kind), "names", None) != getattr(kind, "names", None):
            apart = f"numbers its classes {kind} in {part}, and {kinds[source.name]} before"
            raise ValueError(f"{source.where}: {column!r} {apart}; write all files with the same list of classes")
        seen[source.name or source.where, part] = {_name(kind, value) for value in values_of(rows, column)}
        trained |= seen[source.name or source.where, part] if part == "train" else set()
    for (where, part), found in seen.items():
        if unknown := sorted(found - trained):
            advice = "move some of their rows to train, or leave them out"
            raise ValueError(f"{where}: labels {unknown[:5]} are in {part} and never trained on; {advice}")
    names = _in_order(trained, [*kinds.values()])
    if len(names) < 2:
        where, column = sources[0].where, sources[0].columns[key]
        raise ValueError(f"{where}: {column!r} holds one class ({', '.join(names)}); at least two are needed")
    number = {name: index for index, name in enumerate(names)}
    return names, {source: _number(kind, number) for source, kind in kinds.items()}


def are_shares(sources: Sequence[Source]) -> bool:
    """Whether the first source's labels are lists of numbers: the share of each class."""
    for _, _, rows, column in columns_of(sources, "label"):
        return str(getattr(inside(rows.types[column]), "dtype", "")).startswith("float")
    return False


def shares_of(sources: Sequence[Source]) -> list[str]:
    """Return the classes of labels that are shares of each class. Raises ValueError if the shares of a row differ in
    number, are negative, or do not sum to 1."""
    import numpy as np

    classes = 0
    for source, _, rows, column in columns_of(sources, "label"):
        if not str(getattr(inside(rows.types[column]), "dtype", "")).startswith("float"):
            raise rejected(source, "label", rows.types[column], "expected class probabilities, as in the other data")
        before = 0
        for array in rows.values(column):
            for number, shares in enumerate(array.to_pylist()):
                classes = classes or len(shares or ())
                good = len(shares or ()) == classes and all(share is not None and share >= 0 for share in shares)
                if not good or not np.isclose(sum(shares), 1.0, atol=1e-3):
                    good_ = f"shares of {classes} classes, which are 0 or more and sum to 1"
                    raise ValueError(f"{rows.where(before + number)}: {shares} in {column!r} are not {good_}")
            before += len(array)
    if classes < 2:
        where, column = sources[0].where, sources[0].columns["label"]
        raise ValueError(f"{where}: {column!r} holds one class; at least two are needed")
    return list(map(str, range(classes)))


def counts_of(sources: Sequence[Source], numbers: Numbers, classes: int) -> list[int]:
    """How many training rows each class has."""
    counts = [0] * classes
    for source, part, rows, column in columns_of(sources, "label"):
        for array in rows.values(column) if part == "train" else ():
            for found in array.value_counts().to_pylist():
                counts[numbers[source.name](found["values"])] += found["counts"]
    return counts


def numbers_of(source: Source, key: str, classes: Sequence[str], *, lists: bool = False) -> Callable[[Any], int]:
    """Return what maps a label to its number among known ``classes``. Raises ValueError for a missing or unknown
    label."""
    for _, _, rows, column in columns_of([source], key):
        kind = inside(rows.types[column]) if lists else rows.types[column]
        if not _is_label(kind):
            raise rejected(source, key, rows.types[column], "one label for each is needed (text or a whole number)")
        if unknown := sorted({_name(kind, value) for value in values_of(rows, column)} - set(classes)):
            raise ValueError(f"{source.where}: labels {unknown[:5]} were never trained on; remove their rows")
    return _number(kind, {name: index for index, name in enumerate(classes)})


def _number(kind: Any, number: Mapping[str, int]) -> Callable[[Any], int]:
    return lambda value: number[_name(kind, value)]


def likeliest(logits: Tensor, classes: Sequence[str]) -> dict[str, list[Any]]:
    """Return the class of each sample and its probability; logits have shape (samples, classes)."""
    confidence, found = logits.float().softmax(-1).max(-1)
    return {"prediction": [classes[number] for number in found.tolist()], "confidence": confidence.tolist()}


def _in_order(trained: set[str], kinds: Sequence[Any]) -> list[str]:
    """Classes in the order that their maker gave them, of numbers in theirs, else by name."""
    own = [kind.names for kind in kinds if hasattr(kind, "names")]
    if own and trained <= set(own[0]):
        return [name for name in own[0] if name in trained]
    whole = all(re.fullmatch(r"-?[0-9]+", name) for name in trained)
    return sorted(trained, key=lambda name: (int(name), name) if whole else (0, name))


def _is_label(kind: Any) -> bool:
    dtype = str(getattr(kind, "dtype", ""))
    plain = inside(kind) is None and not isinstance(kind, Mapping) and getattr(kind, "id", None) != OBJECTS
    return plain and (dtype in ("string", "large_string", "bool") or dtype.startswith(("int", "uint")))


def _name(kind: Any, value: Any) -> str:
    return str(kind.names[value]) if hasattr(kind, "names") else str(value)


def _unlabelled(rows: Any, column: str, kind: Any) -> bool:
    """Whether no row has a label: nothing, or ``ClassLabel``'s -1."""
    if getattr(kind, "dtype", "") == "null":
        return True
    if not _is_label(kind):
        return False
    none = {None, -1} if hasattr(kind, "names") else {None, ""}
    return all(set(array.unique().to_pylist()) <= none for array in rows.values(column))
