"""Checks of the columns of a user's data set, before training."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from oneloop.basics.files import replacing
from oneloop.tasks.rows.arrow_tables import with_texts
from oneloop.tasks.rows.cache import alone, key_of, rows_content
from oneloop.tasks.rows.image_rows import empty_classes, loose_images
from oneloop.tasks.rows.images import checked_images, is_image
from oneloop.tasks.rows.objects import OBJECTS
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import (
    check_value,
    is_finite,
    is_remote,
    reject_large_labels,
    sampled,
)
from oneloop.tasks.rows.rows import FINDINGS, unusable

_CACHE_VERSION = 3  # increase it if a check changes
UNTAGGED = (-100, "-100")  # tags of words that are not trained, as in examples of transformers
_MAX_LABELS = 100_000  # maximum number of distinct labels


def columns_of(sources: Sequence[Source], key: str) -> Iterator[tuple[Source, str, Any, str]]:
    """Yield (source, split, rows, column name) for each column of this task key.

    Sources without such a column are left out.
    """
    for source in sources:
        column = source.columns[key]
        if not column:
            continue
        # Go through a copy: classes_of removes a test split without labels.
        for split, rows in [*source.parts.items()]:
            yield source, split, rows, column


def wrong_type(source: Source, key: str, kind: Any, wanted: str) -> ValueError:
    """Return the error for a column of the wrong type.

    Args:
        source: the data set.
        key: task key of the column.
        kind: type of the column.
        wanted: description of the right types.
    """
    return ValueError(
        f"{source.where}: {source.columns[key]!r} holds {type_name(kind)}; expected {wanted}; "
        f"set another task.{key.rstrip('_0123456789')}"
    )


def check_texts(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key is not text, or a value is missing."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(rows.types[column]):
            raise wrong_type(source, key, rows.types[column], "text")
        checked_values(source, rows, column)


def check_words(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key does not hold non-empty lists of texts."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(element_type(rows.types[column])):
            raise wrong_type(source, key, rows.types[column], "lists of texts")
        checked_values(source, rows, column)


def check_image_types(sources: Sequence[Source]) -> None:
    """Raise ValueError if the image column does not hold images."""
    for source, _, rows, column in columns_of(sources, "image"):
        if not is_image(rows.types[column]):
            raise wrong_type(source, "image", rows.types[column], "images (files, or their bytes)")


def check_images(sources: Sequence[Source], *, limit: int, skipped: list[str] | None) -> None:
    """Decode all images once, and note what is unusual about them.

    Args:
        sources: their ``unusable`` gets the rows whose images cannot be used.
        limit: maximum pixels of an image.
        skipped: gets the positions and reasons of these rows, which are left out of the splits;
            None: they are an error.

    Raises:
        ValueError: images cannot be used, and ``skipped`` is None.
    """
    check_image_types(sources)
    for source in sources:
        # Decode the images of all splits.
        count = 0
        converted = Counter[str]()
        turned = 0
        bad = list[tuple[str, str]]()  # position and reason
        for split, rows in source.parts.items():
            if is_remote(rows):
                source.skipped = None if skipped is None else []
                rows = sampled(rows)
            checked = checked_images(rows, source.columns["image"], limit=limit, what=source.where)
            count += len(rows)
            if is_remote(rows) and skipped is not None:
                continue  # they are left out while they are read
            source.unusable[split] = checked.indices
            bad += [(rows.where(index), why) for index, why in checked.unusable]
            converted += Counter(checked.converted)
            turned += checked.turned
        empty = [*map(str, empty_classes(source.found))]

        # Collect what ``oneloop check`` reports; otherwise stop, or skip the rows.
        findings = FINDINGS.get()
        if findings is not None:
            findings.rows += count
            findings.unusable += bad
            for file in loose_images(source.found):
                findings.unusable.append((str(file), "it is next to the class folders"))
            findings.converted += converted
            findings.empty += empty
        elif bad and skipped is None:
            raise ValueError(
                f"{len(bad):,} of {count:,} images cannot be used, the first: "
                f"{': '.join(bad[0])}; oneloop check {source.where} lists all; remove them, or set "
                "task.unreadable skip"
            )
        elif bad and skipped is not None:
            skipped += map(": ".join, bad)
            source.notes.append(
                f"{len(bad):,} of {count:,} images are skipped and listed in environment.json; "
                f"the first: {': '.join(bad[0])}"
            )

        # Note what training does not stop for.
        if converted:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in converted.items())
            divided = " (divided by 257)" if "16-bit" in converted else ""
            source.notes.append(f"images converted to RGB: {kinds}{divided}")
        if turned:
            source.notes.append(f"images turned as their EXIF orientation says: {turned:,}")
        if empty:
            source.notes.append(f"class folders without images: {', '.join(empty[:5])}")


def check_numbers(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key does not hold finite numbers.

    Texts of finite numbers are right, too.
    """
    for source, _, rows, column in columns_of(sources, key):
        kind = rows.types[column]
        dtype = str(getattr(kind, "dtype", ""))
        is_number = element_type(kind) is None and dtype.startswith(("float", "int", "uint"))
        if not is_number and not is_text(kind):
            raise wrong_type(source, key, kind, "a number")
        checked_values(source, rows, column, numbers=True)


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    plain = element_type(kind) is None and getattr(kind, "id", None) != OBJECTS
    return plain and getattr(kind, "dtype", None) in ("string", "large_string")


def element_type(kind: Any) -> Any:
    """Return the element type of a column of lists; None for other columns."""
    if isinstance(kind, list) and len(kind) == 1:
        return kind[0]
    return getattr(kind, "feature", None)


def type_name(kind: Any) -> str:
    """Return a column type as text for error messages."""
    if isinstance(kind, Mapping):
        return f"objects of {', '.join(kind)}"
    if element_type(kind) is not None:
        return f"lists of {type_name(element_type(kind)).removeprefix('values of ')}"
    if getattr(kind, "id", None) == OBJECTS:
        return OBJECTS
    return f"values of {getattr(kind, 'dtype', type(kind).__name__)}"


def checked_values(
    source: Source,
    rows: Any,
    column: str,
    *,
    labels: bool = False,
    known: bool = False,
    numbers: bool = False,
) -> Sequence[Any]:
    """Check a column, and return its distinct values if they are labels.

    Of remote rows, some are checked now, and each one while it is read. Labels that decide which
    classes there are must be read completely: with those of a sample, the model would differ.

    Args:
        source: its ``checks`` get that of the column.
        rows: rows of a split.
        column: name of the column.
        labels: whether its values are labels.
        known: whether the classes are known already.
        numbers: whether its values must be finite numbers, or texts of them.

    Raises:
        ValueError: a value cannot be used, or the labels of remote rows are too many.
    """
    if is_remote(rows):
        kind = element_type(rows.types[column]) or rows.types[column]
        source.checks[column] = partial(check_value, column, kind, labels, numbers)
        if not labels or known:
            rows = sampled(rows)
        elif not hasattr(kind, "names"):
            reject_large_labels(rows, column)
        try:
            return values_of(rows, column, distinct=labels, numbers=numbers)
        except ValueError:
            # Texts that are not UTF-8 are listed while they are read.
            rows = with_texts(rows, [column], None if source.skipped is None else [])
    return values_of(rows, column, distinct=labels, numbers=numbers)


def values_of(
    rows: Any, column: str, *, distinct: bool = True, numbers: bool = False
) -> Sequence[Any]:
    """Return the distinct values of a column, or of its lists, cached by the rows' content.

    Args:
        rows: rows of a split.
        column: name of the column.
        distinct: return the values; False: only check them.
        numbers: check that each value is a finite number, or the text of one.

    Raises:
        ValueError: a value is missing, or is not such a number.
    """
    key = key_of(_CACHE_VERSION, rows_content(rows), column, distinct, numbers)
    with alone(f"values/{key}.json") as file:
        if not file.exists():
            values = _checked_values(rows, column, distinct=distinct, numbers=numbers)
            # Do not cache the values of rows with findings: they would not be found again.
            findings = FINDINGS.get()
            if findings and findings.unusable:
                return values
            with replacing(file) as draft:
                draft.write_text(json.dumps(values))
        known: list[Any] = json.loads(file.read_text())
        return known


def _checked_values(rows: Any, column: str, *, distinct: bool, numbers: bool) -> list[Any]:
    from pyarrow import compute

    kind = element_type(rows.types[column]) or rows.types[column]
    seen: set[Any] = set()
    before = 0
    for array in rows.values(column):
        array.validate(full=True)  # raises ValueError if a text is not UTF-8
        lists = hasattr(array, "flatten") and element_type(rows.types[column]) is not None
        values = array.flatten() if lists else array

        # Find the missing values. ClassLabel stores them as -1, and an empty text is no label.
        missing = values.is_null()
        if hasattr(kind, "names"):
            missing = compute.or_(missing, compute.less(compute.fill_null(values, -1), 0))
            if lists:  # a tag of -100 is ignored
                ignored = compute.equal(compute.fill_null(values, -1), -100)
                missing = compute.and_not(missing, ignored)
        elif distinct and is_text(kind):
            missing = compute.or_(missing, compute.equal(compute.fill_null(values, ""), ""))
        missing = missing.to_numpy(zero_copy_only=False)

        # Find the rows that have one. An empty list has no value either.
        wrong = array.is_null().to_numpy(zero_copy_only=False)
        if lists:
            lengths = compute.fill_null(compute.list_value_length(array), 0)
            lengths = lengths.to_numpy(zero_copy_only=False)
            row_of = np.repeat(np.arange(len(array)), lengths)
            wrong = wrong | (lengths == 0)
            wrong[row_of[missing]] = True
        else:
            wrong = wrong | missing

        # Report them, then values that are not numbers.
        for at in np.flatnonzero(wrong).tolist():
            unusable(
                rows.where(before + at), f" has no value in {column!r}; fill it, or remove the row"
            )
        if numbers:
            for at in _non_numbers(values):
                unusable(
                    rows.where(before + at),
                    f": {values[at].as_py()!r} in {column!r} is not a finite number in float32",
                )

        # Collect the values, and stop if there are too many to be classes.
        if distinct:
            seen |= set(compute.unique(values.filter(~missing)).to_pylist())
            seen -= {*UNTAGGED} if lists else set()
        if len(seen) > _MAX_LABELS:
            raise ValueError(
                f"{rows.where(before)}: {column!r} has over {_MAX_LABELS:,} different classes: "
                "too many"
            )
        before += len(array)
        # Over a network, read only until all classes of the schema have occurred.
        if distinct and is_remote(rows) and len(seen) == len(getattr(kind, "names", ())):
            break
    return sorted(seen)


def _non_numbers(values: Any) -> Iterator[int]:
    """Yield the indices of values that are not finite numbers, or texts of them."""
    for at, value in enumerate(values.to_pylist()):
        # a missing value is already known
        if value is not None and not is_finite(value):
            yield at


def number_of_text(text: str) -> int:
    """Return a signed 64-bit number of a text.

    It is the same on every machine, and equal only for equal texts.
    """
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(text.encode(errors="surrogatepass")) - (1 << 63)


def repeated(texts: Iterable[str]) -> int:
    """Return how many texts are equal to an earlier one."""
    numbers = np.fromiter(map(number_of_text, texts), dtype=np.int64)
    return len(numbers) - len(np.unique(numbers))


def texts_of(rows: Any, column: str) -> Iterator[str]:
    """Yield the texts of a column."""
    for array in rows.values(column):
        for text in array.to_pylist():
            # Replace lone surrogates, which are not valid UTF-8.
            yield text.encode(errors="replace").decode()
