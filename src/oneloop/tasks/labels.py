"""Classes and class numbers of a label column."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from oneloop.data.rows.csv_json import OBJECTS
from oneloop.data.rows.open_data import Source
from oneloop.tasks.columns import columns_of, element_type, values_of, wrong_type

# by source name: a function from a label to its class number
Numbers = Mapping[str, Callable[[Any], int]]
RECORDED: ContextVar[dict[str, Any] | None] = ContextVar("RECORDED", default=None)
"""classes and image shape of a run, so that ``oneloop predict`` needs no training data; None: a
task reads its data"""


def classes_of(
    sources: Sequence[Source], key: str, *, lists: bool = False
) -> tuple[list[str], Numbers]:
    """Return the class names of a label column (text, integers, booleans or ``ClassLabel``), and
    functions from a label to its class number. ``lists``: a row has several labels. A test split
    without labels is removed. Raise ValueError for a missing label, a label that is not in the
    training split, or another column type."""
    trained: set[str] = set()
    seen: dict[tuple[str, str], set[str]] = {}
    kinds: dict[str, Any] = {}
    for source, split, rows, column in columns_of(sources, key):
        kind = element_type(rows.types[column]) if lists else rows.types[column]
        if split == "test" and not lists and _unlabelled(rows, column, kind):
            del source.parts["test"]
            source.notes.append(
                f"{source.where}: no row of the test split has a label, so it is not evaluated"
            )
            continue
        if not _is_label(kind):
            wanted = (
                f"{'a list of labels' if lists else 'one label'} for each row (text or a whole "
                "number)"
            )
            raise wrong_type(source, key, rows.types[column], wanted)
        if getattr(kinds.setdefault(source.name, kind), "names", None) != getattr(
            kind, "names", None
        ):
            difference = f"numbers its classes {kind} in {split}, and {kinds[source.name]} before"
            raise ValueError(
                f"{source.where}: {column!r} {difference}; write all files with the same list "
                "of classes"
            )
        seen[source.name or source.where, split] = {
            _name(kind, value) for value in values_of(rows, column)
        }
        trained |= seen[source.name or source.where, split] if split == "train" else set()
    for (where, split), found in seen.items():
        if unknown := sorted(found - trained):
            advice = "move some of their rows to train, or leave them out"
            raise ValueError(
                f"{where}: labels {unknown[:5]} occur in {split} but not in train; {advice}"
            )
    names = _sorted_classes(trained, [*kinds.values()])
    if len(names) < 2:
        where, column = sources[0].where, sources[0].columns[key]
        raise ValueError(
            f"{where}: {column!r} holds one class ({', '.join(names)}); at least two are needed"
        )
    numbers = {name: index for index, name in enumerate(names)}
    return names, {source: _number_of(kind, numbers) for source, kind in kinds.items()}


def are_shares(sources: Sequence[Source]) -> bool:
    """Whether the labels of the first source are lists with the probability of each class."""
    for _, _, rows, column in columns_of(sources, "label"):
        return str(getattr(element_type(rows.types[column]), "dtype", "")).startswith("float")
    return False


def shares_of(sources: Sequence[Source]) -> list[str]:
    """Return the class names for labels that are class probabilities. Raise ValueError if rows
    differ in the number of probabilities, one is negative, or a row does not sum to 1."""
    import numpy as np

    classes = 0
    for source, _, rows, column in columns_of(sources, "label"):
        if not str(getattr(element_type(rows.types[column]), "dtype", "")).startswith("float"):
            raise wrong_type(
                source, "label", rows.types[column], "class probabilities, as in the other data"
            )
        before = 0
        for array in rows.values(column):
            for number, shares in enumerate(array.to_pylist()):
                classes = classes or len(shares or ())
                valid = len(shares or ()) == classes and all(
                    share is not None and share >= 0 for share in shares
                )
                if not valid or not np.isclose(sum(shares), 1.0, atol=1e-3):
                    good_ = f"shares of {classes} classes, which are 0 or more and sum to 1"
                    raise ValueError(
                        f"{rows.where(before + number)}: {shares} in {column!r} are not {good_}"
                    )
            before += len(array)
    if classes < 2:
        where, column = sources[0].where, sources[0].columns["label"]
        raise ValueError(f"{where}: {column!r} holds one class; at least two are needed")
    return list(map(str, range(classes)))


def counts_of(sources: Sequence[Source], numbers: Numbers, classes: int) -> list[int]:
    """Return the number of training rows of each class."""
    counts = [0] * classes
    for source, split, rows, column in columns_of(sources, "label"):
        for array in rows.values(column) if split == "train" else ():
            for entry in array.value_counts().to_pylist():
                counts[numbers[source.name](entry["values"])] += entry["counts"]
    return counts


def numbers_of(
    source: Source, key: str, classes: Sequence[str], *, lists: bool = False
) -> Callable[[Any], int]:
    """Return a function from a label to its number in ``classes``. Raise ValueError for a missing
    or unknown label."""
    for _, _, rows, column in columns_of([source], key):
        kind = element_type(rows.types[column]) if lists else rows.types[column]
        if not _is_label(kind):
            raise wrong_type(
                source, key, rows.types[column], "one label for each row (text or a whole number)"
            )
        if unknown := sorted(
            {_name(kind, value) for value in values_of(rows, column)} - set(classes)
        ):
            raise ValueError(
                f"{source.where}: labels {unknown[:5]} were never trained on; remove their rows"
            )
    return _number_of(kind, {name: index for index, name in enumerate(classes)})


def _number_of(kind: Any, number: Mapping[str, int]) -> Callable[[Any], int]:
    return lambda value: number[_name(kind, value)]


def likeliest(logits: Tensor, classes: Sequence[str]) -> dict[str, list[Any]]:
    """Return the most likely class of each sample and its probability; logits have shape (samples,
    classes)."""
    confidence, predicted = logits.float().softmax(-1).max(-1)
    return {
        "prediction": [classes[number] for number in predicted.tolist()],
        "confidence": confidence.tolist(),
    }


def _sorted_classes(trained: set[str], kinds: Sequence[Any]) -> list[str]:
    """Return the classes in ``ClassLabel`` order, else sorted as integers, else by name."""
    class_labels = [kind.names for kind in kinds if hasattr(kind, "names")]
    if class_labels and trained <= set(class_labels[0]):
        return [name for name in class_labels[0] if name in trained]
    integers = all(re.fullmatch(r"-?[0-9]+", name) for name in trained)
    return sorted(trained, key=lambda name: (int(name), name) if integers else (0, name))


def _is_label(kind: Any) -> bool:
    dtype = str(getattr(kind, "dtype", ""))
    plain = (
        element_type(kind) is None
        and not isinstance(kind, Mapping)
        and getattr(kind, "id", None) != OBJECTS
    )
    return plain and (
        dtype in ("string", "large_string", "bool") or dtype.startswith(("int", "uint"))
    )


def _name(kind: Any, value: Any) -> str:
    return str(kind.names[value]) if hasattr(kind, "names") else str(value)


def _unlabelled(rows: Any, column: str, kind: Any) -> bool:
    """Whether no row has a label (null, empty, or -1 in a ``ClassLabel`` column)."""
    if getattr(kind, "dtype", "") == "null":
        return True
    if not _is_label(kind):
        return False
    none = {None, -1} if hasattr(kind, "names") else {None, ""}
    return all(set(array.unique().to_pylist()) <= none for array in rows.values(column))
