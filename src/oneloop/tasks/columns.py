"""Checks of the columns of a user's data set, before training."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from oneloop.tasks.rows.arrow_tables import with_texts
from oneloop.tasks.rows.cache import cached_json, key_of, rows_content
from oneloop.tasks.rows.image_rows import empty_classes, loose_images
from oneloop.tasks.rows.images import TURNED, checked_images, is_image
from oneloop.tasks.rows.objects import OBJECTS
from oneloop.tasks.rows.open_data import Source
from oneloop.tasks.rows.remote_checks import (
    Rule,
    check_value,
    is_remote,
    reject_large_labels,
    sampled,
)
from oneloop.tasks.rows.rows import FINDINGS, Check, Row, unusable

_CACHE_VERSION = 4  # increase it if a check changes
UNTAGGED = (-100, "-100")  # tags of words that are not trained, as in examples of transformers
_SHOWN = 60  # characters of a value in a message
_LOOSE = "it is next to the class folders"
_MAX_LABELS = 100_000  # maximum number of distinct labels


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    plain = element_type(kind) is None and getattr(kind, "id", None) != OBJECTS
    return plain and getattr(kind, "dtype", None) in ("string", "large_string")


def element_type(kind: Any) -> Any:
    """Return the element type of a column of lists; None for other columns."""
    if isinstance(kind, list) and len(kind) == 1:
        return kind[0]
    return getattr(kind, "feature", None)


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
    column = source.columns[key]
    setting = f"task.{key.rstrip('_0123456789')}"
    for rows in source.parts.values():
        if getattr(rows.types[column], "id", None) == OBJECTS:
            return _object_error(rows, column, f"{wanted}; name a field ({setting} {column}.FIELD)")
    return ValueError(
        f"{source.where}: {column!r} holds {type_name(kind)}; expected {wanted}; set another "
        f"{setting}"
    )


def _object_error(rows: Any, column: str, expected: str) -> ValueError:
    """Return the error for the first object of a column, which is stored as JSON beside texts."""
    for index, value in enumerate(values_of(rows, column)):
        if value is not None and not value.startswith('"'):
            return ValueError(
                f"{rows.where(index)}: {value[:_SHOWN]} in {column!r} is an object or a list; "
                f"expected {expected} or another column, or correct the row"
            )
    raise AssertionError(column)  # such a column has objects


def check_column(
    sources: Sequence[Source],
    key: str,
    fits: Callable[[Any], bool] = is_text,
    wanted: str = "text",
    rule: Rule | None = "values",
) -> None:
    """Raise ValueError if a column has another type, or a value that cannot be used.

    Args:
        sources: the data sets.
        key: task key of the column.
        fits: whether a type is right.
        wanted: description of the right types.
        rule: what the values must be; None: they are not checked.
    """
    for source, _, rows, column in columns_of(sources, key):
        if not fits(rows.types[column]):
            raise wrong_type(source, key, rows.types[column], wanted)
        if rule:
            checked_values(source, rows, column, rule)


def check_image_types(sources: Sequence[Source]) -> None:
    """Raise ValueError if the image column does not hold images."""
    check_column(sources, "image", is_image, "images (files, or their bytes)", None)


def check_together(
    sources: Sequence[Source], keys: Sequence[str], problem: Callable[..., str]
) -> None:
    """Raise ValueError if values of several columns of a row do not fit each other.

    Rows are checked once. Of remote ones, some are checked before, and each while it is read.

    Args:
        sources: the data sets.
        keys: task keys of the columns.
        problem: returns what is wrong with the values of these columns; empty if nothing is.
    """
    for source in sources:
        columns = [source.columns[key] for key in keys]
        check = partial(_problem_of_row, columns, problem)
        for rows in source.parts.values():
            checked_rows(source, rows, columns, problem.__name__, check)


def unlearnable(anchor: str, positive: str, *negatives: str) -> str:
    """Return why nothing can be learned from a pair of texts; empty if something can.

    Args:
        anchor: the first text.
        positive: the text that belongs to it.
        negatives: texts that do not belong to it.
    """
    if not all(map(str.strip, (anchor, positive, *negatives))):
        return "a text of the pair is empty; fill it, or remove the row"
    if positive in negatives:
        return "a hard negative is equal to the positive; write another text, or remove the row"
    return ""


def _problem_of_row(columns: Sequence[str], problem: Callable[..., str], row: Row) -> str:
    """Return what is wrong with the values of these columns."""
    values = [row[column] for column in columns]
    # A missing value is already known.
    why = "" if None in values else problem(*values)
    return why and f": {why}"


def check_images(sources: Sequence[Source], *, limit: int) -> None:
    """Decode all images once, and note what is unusual about them.

    Args:
        sources: their ``unusable`` gets the rows whose images cannot be used. If such rows are
            skipped, their ``skipped`` gets positions and reasons.
        limit: maximum pixels of an image.

    Raises:
        ValueError: images cannot be used, and are not skipped.
    """
    check_image_types(sources)
    for source in sources:
        # Decode the images of all splits.
        count = 0
        converted = Counter[str]()
        bad = list[tuple[str, str]]()  # position and reason
        for split, all_rows in source.parts.items():
            rows = sampled(all_rows)
            checked = checked_images(rows, source.columns["image"], limit=limit, what=source.where)
            count += len(rows)
            if is_remote(rows) and source.skipped is not None:
                continue  # they are left out while they are read
            source.unusable[split] = np.array([index for index, _ in checked.skipped], np.int64)
            bad += [(rows.where(index), why) for index, why in checked.skipped]
            for kind, (images, *_) in sorted(checked.remarks.items()):
                converted[kind] += images
        turned = converted.pop(TURNED, 0)
        empty = [*map(str, empty_classes(source.found))]

        # Collect what ``oneloop check`` reports; otherwise stop, or skip the rows.
        findings = FINDINGS.get()
        if findings is not None:
            loose = [(str(file), _LOOSE) for file in loose_images(source.found)]
            findings.rows += count
            findings.unusable += bad + loose
            findings.converted += converted
            findings.empty += empty
        elif source.skipped is not None:
            source.skipped += map(": ".join, bad)
        elif bad:
            raise ValueError(
                f"{len(bad):,} of {count:,} images cannot be used, the first: "
                f"{': '.join(bad[0])}; oneloop check {source.where} lists all; remove them, or set "
                "task.unreadable skip"
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
    source: Source, rows: Any, column: str, rule: Rule = "values", *, known: bool = False
) -> Sequence[Any]:
    """Check a column of values, or of lists of them; see :func:`checked_rows`."""
    kind = element_type(rows.types[column]) or rows.types[column]
    check = partial(check_value, column, kind, rule)
    classes = len(getattr(kind, "names", ()))
    return checked_rows(source, rows, [column], rule, check, known=known, classes=classes)


def checked_rows(
    source: Source,
    rows: Any,
    columns: Sequence[str],
    rule: str,
    check: Check,
    *,
    known: bool = False,
    classes: int = 0,
) -> Sequence[Any]:
    """Check each row once, cached by content; return the distinct values if they are labels.

    Of remote rows, some are checked now, and each one while it is read. Labels that decide which
    classes there are must be read completely: with those of a sample, the model would differ.

    Args:
        source: its ``checks`` get that of remote rows.
        rows: rows of a split.
        columns: names of the columns that are checked together.
        rule: name of the check; of ``labels``, the distinct values are returned.
        check: returns what is wrong with a row; empty if nothing is.
        known: whether the classes are known already.
        classes: number of classes in the schema.

    Raises:
        ValueError: a row cannot be used, or the labels of remote rows are too many.
    """
    if is_remote(rows):
        source.checks[f"{rule} {columns}"] = check
        if rule != "labels" or known:
            rows = sampled(rows)
        elif not classes:
            reject_large_labels(rows, columns[0])
    check_now = partial(_check_each, rows, columns, rule, check, classes)
    if FINDINGS.get() is not None:
        return check_now()  # ``oneloop check`` lists the rows each time
    key = key_of(_CACHE_VERSION, rows_content(rows), columns, rule)
    try:
        values: list[Any] = cached_json(f"values/{key}.json", check_now)
    except UnicodeDecodeError:
        # Texts of remote rows that are not UTF-8 are listed while they are read.
        some = with_texts(rows, columns, None if source.skipped is None else [])
        values = _check_each(some, columns, rule, check, classes)
    return values


def _check_each(
    rows: Any, columns: Sequence[str], rule: str, check: Check, classes: int
) -> list[Any]:
    """Check each row, and return the distinct labels; ``classes``: their number in the schema."""
    labels = set[Any]()
    values = [values_of(rows, column) for column in columns]
    for number, row in enumerate(zip(*values, strict=True)):
        why = check(dict(zip(columns, row, strict=True)))
        if why:
            unusable(rows.where(number), why)
        elif rule == "labels":
            labels.update(row[0] if isinstance(row[0], list) else row)
            labels.difference_update(UNTAGGED if isinstance(row[0], list) else ())
        if len(labels) > _MAX_LABELS:
            raise ValueError(
                f"{rows.where(number)}: {columns[0]!r} has over {_MAX_LABELS:,} different classes: "
                "too many"
            )
        # Over a network, read only until all classes of the schema have occurred.
        if labels and is_remote(rows) and len(labels) == classes:
            break
    return sorted(labels)


def values_of(rows: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column."""
    for array in rows.values(column):
        yield from array.to_pylist()


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
    for text in values_of(rows, column):
        # Replace lone surrogates, which are not valid UTF-8.
        yield text.encode(errors="replace").decode()
