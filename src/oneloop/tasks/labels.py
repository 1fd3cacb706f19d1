"""Classes and class numbers of a label column."""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.columns import (
    checked_rows,
    checked_values,
    columns_of,
    element_type,
    is_text,
    values_of,
    wrong_type,
)
from oneloop.tasks.rows.image_rows import composed
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import is_remote, reject_large_labels
from oneloop.tasks.rows.rows import Row

# by source name: a function from a label to its class number
Numbers = Mapping[str, Callable[[Any], int]]


def classes_of(
    sources: Sequence[Source], key: str, *, lists: bool = False
) -> tuple[list[str], Numbers]:
    """Return the class names of a label column, and functions from a label to its class number.

    A test split without labels is removed.

    Args:
        sources: the data sets.
        key: task key of the column: text, integers, booleans or ``ClassLabel``.
        lists: a row has several labels.

    Raises:
        ValueError: a label is missing or is not in the training split, or the column has another
            type.
    """
    trained: set[str] = set()
    seen: dict[tuple[str, str], set[str]] = {}  # labels by source and split
    kinds: dict[str, Any] = {}  # column type by source

    # Collect the labels of each split.
    for source, split, rows, column in columns_of(sources, key):
        if split == "test" and not lists and _unlabelled(rows, column):
            del source.parts["test"]
            source.notes.append(
                f"{source.where}: no row of the test split has a label, so it is not evaluated"
            )
            continue
        kind, found = _labels(source, key, rows, column, lists=lists)

        # ClassLabel stores numbers, which mean the same only with the same names.
        before = kinds.setdefault(source.name, kind)
        if getattr(before, "names", None) != getattr(kind, "names", None):
            raise ValueError(
                f"{source.where}: {column!r} numbers its classes {kind} in {split}, and {before} "
                "before; write all files with the same list of classes"
            )
        seen[source.name or source.where, split] = found
        if split == "train":
            trained |= found

    # Every label must be trained.
    known = set(map(composed, trained))
    for (where, split), found in seen.items():
        unknown = sorted(label for label in found if composed(label) not in known)
        if unknown:
            raise ValueError(
                f"{where}: labels {unknown[:5]} occur in {split} but not in train; move some of "
                "their rows to train, or leave them out; if the splits were drawn, write files for "
                "train and validation"
            )

    # macOS decomposes the names of files: ``é`` is ``e`` and an accent.
    spellings = Counter(map(composed, set().union(*seen.values())))
    merged = {name for name, count in spellings.items() if count > 1}
    trained = {composed(name) if composed(name) in merged else name for name in trained}
    if merged:
        sources[0].notes.append(
            "classes that are spelled in several Unicode forms are one class: "
            f"{', '.join(sorted(merged))}"
        )

    # Number the classes.
    names = _sorted_classes(trained, [*kinds.values()])
    origins = [source.origin(key, kinds.get(source.name)) for source in sources]
    sources[0].notes.append(
        f"{len(names):,} classes: {reprlib.repr(names)}, from {' and '.join(origins)}"
    )
    if len(names) < 2:
        raise ValueError(
            f"{sources[0].where}: {sources[0].columns[key]!r} holds one class "
            f"({', '.join(names)}); at least two are needed"
        )
    numbers = {composed(name): index for index, name in enumerate(names)}
    return names, {source: partial(_number_of, kind, numbers) for source, kind in kinds.items()}


def are_shares(sources: Sequence[Source]) -> bool:
    """Whether the labels of the first source are lists with the probability of each class."""
    for _, _, rows, column in columns_of(sources, "label"):
        return _is_shares(rows.types[column])
    return False


def _is_shares(kind: Any) -> bool:
    """Whether a column of this type holds lists of numbers that are not whole."""
    return str(getattr(element_type(kind), "dtype", "")).startswith("float")


def shares_of(sources: Sequence[Source]) -> list[str]:
    """Return the class names for labels that are class probabilities: "0", "1", ….

    Raise ValueError if rows differ in the number of probabilities, one is negative, or a row does
    not sum to 1.
    """
    classes = 0
    for source, _, rows, column in columns_of(sources, "label"):
        if not _is_shares(rows.types[column]):
            raise wrong_type(
                source, "label", rows.types[column], "class probabilities, as in the other data"
            )
        # The first row sets the number of classes.
        classes = classes or len(rows[0][column] or ())
        check = partial(_check_shares, column, classes)
        checked_rows(source, rows, [column], f"{classes} shares", check)

    if classes < 2:
        raise ValueError(
            f"{sources[0].where}: {sources[0].columns['label']!r} holds one class; at least two "
            "are needed"
        )
    return list(map(str, range(classes)))


def _check_shares(column: str, classes: int, row: Row) -> str:
    """Return why a row has no probability of each class; empty if it has them."""
    shares = row[column]
    valid = len(shares or ()) == classes and all(
        share is not None and share >= 0 for share in shares
    )
    if valid and abs(sum(shares) - 1.0) <= 1.01e-3:
        return ""
    return (
        f": {shares} in {column!r} are not shares of {classes} classes, which are 0 or more and "
        "sum to 1"
    )


def counts_of(sources: Sequence[Source], numbers: Numbers, classes: int) -> list[int]:
    """Return the number of training rows of each class.

    Args:
        sources: the data sets.
        numbers: functions from a label to its class number, by source.
        classes: number of classes.
    """
    counts = [0] * classes
    for source, split, rows, column in columns_of(sources, "label"):
        if split != "train":
            continue
        if is_remote(rows):
            reject_large_labels(rows, column)
        for label, count in Counter(values_of(rows, column)).items():
            counts[numbers[source.name](label)] += count
    return counts


def numbers_of(
    source: Source, key: str, classes: Sequence[str], *, lists: bool = False
) -> Callable[[Any], int]:
    """Return a function from a label to its number in ``classes``.

    Args:
        source: the data set.
        key: task key of the label column.
        classes: names of the known classes.
        lists: a row has several labels.

    Raises:
        ValueError: a label is missing or unknown, or the column has another type.
    """
    for _, _, rows, column in columns_of([source], key):
        kind, found = _labels(source, key, rows, column, lists=lists, known=True)
        unknown = sorted(set(map(composed, found)) - set(map(composed, classes)))
        if unknown:
            raise ValueError(
                f"{source.where}: labels {unknown[:5]} were never trained on; remove their rows"
            )
    numbers = {composed(name): index for index, name in enumerate(classes)}
    return partial(_number_of, kind, numbers)


def _labels(
    source: Source, key: str, rows: Any, column: str, *, lists: bool, known: bool = False
) -> tuple[Any, set[str]]:
    """Return the type of the labels in a column, and their names.

    Raise ValueError if a label is missing or has another type. ``known``: so are the classes.
    """
    kind = element_type(rows.types[column]) if lists else rows.types[column]
    if not _is_label(kind):
        wanted = "a list of labels" if lists else "one label"
        wanted += " for each row (text or a whole number)"
        raise wrong_type(source, key, rows.types[column], wanted)
    values = checked_values(source, rows, column, "labels", known=known)
    return kind, {_name(kind, value) for value in values}


def _number_of(kind: Any, number: Mapping[str, int], value: Any) -> int:
    name = _name(kind, value)
    try:
        return number[composed(name)]
    except KeyError:
        raise ValueError(f"the label {name!r} was never trained on; remove the row") from None


def weights_of(setting: str | list[float], classes: Sequence[str], counts: Sequence[int]) -> Tensor:
    """Return the weight of each class, shape (classes,).

    Args:
        setting: a weight for each class; or ``balanced``: the weights of all samples of a class add
            up to the same number.
        classes: names of the classes.
        counts: samples of each class; empty if a sample has no class.

    Raises:
        ValueError: the weights are not one number above 0 for each class, or a class has no sample.
    """
    # The user's weights.
    if isinstance(setting, list):
        enough = len(setting) == len(classes)
        if not enough or not all(0 < weight < math.inf for weight in setting):
            names = ", ".join(classes[:8])
            if len(classes) > 8:
                names += ", …"
            raise ValueError(
                f"task.class_weights {setting} must be {len(classes)} weights > 0, for {names}"
            )
        return torch.tensor(setting)

    # Balanced ones.
    if not counts or not all(counts):
        raise ValueError(
            "task.class_weights balanced needs one label for each sample, and a sample of each "
            "class"
        )
    return torch.tensor([sum(counts) / (len(counts) * count) for count in counts])


class OneClass:
    """Base class of the tasks that predict one class of each sample."""

    classes: Sequence[str]

    def update(
        self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        metrics.update(outputs["logits"], batch["label"])

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return the most likely class of each sample, and its probability."""
        confidence, predicted = outputs["logits"].float().softmax(-1).max(-1)
        return {
            "prediction": [self.classes[number] for number in predicted.tolist()],
            "confidence": confidence.tolist(),
        }

    def judged(self, label: int, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return a sample's class, its prediction, and how sure the model is.

        Args:
            label: number of the true class.
            outputs: of this sample.
        """
        confidence, predicted = outputs["logits"].float().softmax(-1).max(-1)
        return {
            "target": self.classes[label],
            "prediction": self.classes[int(predicted)],
            "right": int(predicted) == label,
            "confidence": float(confidence),
        }


def _sorted_classes(trained: set[str], kinds: Sequence[Any]) -> list[str]:
    """Return the classes in ``ClassLabel`` order, else sorted as integers, else by name."""
    class_labels = [kind.names for kind in kinds if hasattr(kind, "names")]
    if class_labels and trained <= set(class_labels[0]):
        return [name for name in class_labels[0] if name in trained]
    integers = all(re.fullmatch(r"-?[0-9]+", name) for name in trained)
    return sorted(trained, key=lambda name: (int(name), name) if integers else (0, name))


def _is_label(kind: Any) -> bool:
    """Whether a column of this type holds one label per row."""
    dtype = str(getattr(kind, "dtype", ""))
    return is_text(kind) or dtype == "bool" or dtype.startswith(("int", "uint"))


def _name(kind: Any, value: Any) -> str:
    """Return the class name of a label; ``ClassLabel`` stores its number."""
    return str(kind.names[value]) if hasattr(kind, "names") else str(value)


def _unlabelled(rows: Any, column: str) -> bool:
    """Whether no row has a label (null, empty, or -1 in a ``ClassLabel`` column)."""
    kind = rows.types[column]
    if getattr(kind, "dtype", "") == "null":
        return True
    if not _is_label(kind):
        return False
    none = {None, -1} if hasattr(kind, "names") else {None, ""}
    return all(set(array.unique().to_pylist()) <= none for array in rows.values(column))
