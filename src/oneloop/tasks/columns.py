"""Checks of the columns of a user's data set, before training."""

import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from oneloop.basics.files import replacing
from oneloop.data.rows.cache import alone, key_of
from oneloop.data.rows.csv_json import OBJECTS
from oneloop.data.rows.open_data import Source

_CACHE_VERSION = 2  # increase it if a check changes
_MAX_LABELS = 100_000  # maximum number of distinct labels


def columns_of(sources: Sequence[Source], key: str) -> Iterator[tuple[Source, str, Any, str]]:
    """Yield (source, split, rows, column name) for each split of the sources that have a column for this task key."""
    for source in sources:
        if column := source.columns[key]:
            for split, rows in [*source.parts.items()]:
                yield source, split, rows, column


def wrong_type(source: Source, key: str, kind: Any, wanted: str) -> ValueError:
    """Return the error for a column of the wrong type."""
    column = source.columns[key]
    return ValueError(
        f"{source.where}: {column!r} holds {type_name(kind)}; expected {wanted}; set task.{key} to another"
    )


def check_texts(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key is not text, or a value is missing."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(rows.types[column]):
            raise wrong_type(source, key, rows.types[column], "text")
        values_of(rows, column, distinct=False)


def check_words(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key does not hold non-empty lists of texts."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(element_type(rows.types[column])):
            raise wrong_type(source, key, rows.types[column], "lists of texts")
        values_of(rows, column, distinct=False)


def check_as_long(sources: Sequence[Source], one: str, other: str) -> None:
    """Raise ValueError if the lists of two columns (by task key) differ in length in a row."""
    from pyarrow import compute

    for source in sources:
        for rows in source.parts.values():
            with alone(f"values/{key_of(rows.fingerprint(), source.columns[one], source.columns[other])}.ok") as done:
                before = 0
                pairs = () if done.exists() else zip(*(rows.values(source.columns[key]) for key in (one, other)))
                for first, second in pairs:
                    lengths = [compute.list_value_length(x).to_numpy(zero_copy_only=False) for x in (first, second)]
                    if len(wrong := np.flatnonzero(lengths[0] != lengths[1])):
                        a, b = (int(both[wrong[0]]) for both in lengths)
                        counts = f"{a} {source.columns[one]} and {b} {source.columns[other]}"
                        raise ValueError(f"{rows.where(before + int(wrong[0]))}: {counts}; each needs one of the other")
                    before += len(first)
                done.touch()


def check_numbers(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this task key does not hold finite numbers, or texts of finite numbers."""
    for source, _, rows, column in columns_of(sources, key):
        kind = rows.types[column]
        plain = element_type(kind) is None and str(getattr(kind, "dtype", "")).startswith(("float", "int", "uint"))
        if not plain and not is_text(kind):
            raise wrong_type(source, key, kind, "a number")
        values_of(rows, column, distinct=False, numbers=True)


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


def is_image(kind: Any) -> bool:
    """Whether a column of this type may hold images: ``Image`` of ``datasets``, bytes, or objects of bytes and path."""
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    return type(kind).__name__ == "Image" or getattr(kind, "dtype", None) in ("binary", "large_binary")


def decoded(value: Any, *, limit: int) -> Any:
    """Decode a stored image to RGB. Raise ValueError if it is damaged, or has more than ``limit`` pixels."""
    from PIL import Image

    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    if data is None and path is None:
        raise ValueError("the image is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # task.pixel_limit is the limit
            opened = Image.open(io.BytesIO(data) if data else str(path))
        with opened as image:
            if image.width * image.height > limit:
                size = f"{image.width:,} x {image.height:,} = {image.width * image.height:,} pixels"
                raise ValueError(f"it has {size}, more than task.pixel_limit {limit:,}; scale it down or raise the key")
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels ({image.mode}) have more than 8 bits; write it with 8")
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path or 'the image'} cannot be read as an image: {error}") from error


def values_of(rows: Any, column: str, *, distinct: bool = True, numbers: bool = False) -> Sequence[Any]:
    """Return the distinct values of a column, or of its lists, cached by the rows' content. Raise ValueError if a value
    is missing, or with ``numbers`` not a finite number or its text. Without ``distinct``, only check."""
    with alone(f"values/{key_of(_CACHE_VERSION, rows.fingerprint(), column, distinct, numbers)}.json") as file:
        if not file.exists():
            values = _checked_values(rows, column, distinct=distinct, numbers=numbers)
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
        lists = hasattr(array, "flatten") and element_type(rows.types[column]) is not None
        values = array.flatten() if lists else array
        missing = values.is_null()
        if hasattr(kind, "names"):  # ClassLabel stores a missing label as -1
            missing = compute.or_(missing, compute.less(compute.fill_null(values, -1), 0))
        elif distinct and is_text(kind):
            missing = compute.or_(missing, compute.equal(compute.fill_null(values, ""), ""))
        wrong = array.is_null().to_numpy(zero_copy_only=False)
        if lists:
            lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            row_of = np.repeat(np.arange(len(array)), lengths)
            wrong = wrong | (lengths == 0)
            wrong[row_of[missing.to_numpy(zero_copy_only=False)]] = True
        else:
            wrong = wrong | missing.to_numpy(zero_copy_only=False)
        if wrong.any():
            row = rows.where(before + int(np.argmax(wrong)))
            raise ValueError(f"{row} has no value in {column!r}; fill it, or remove the row")
        if numbers and (at := _first_non_number(values)) is not None:
            raise ValueError(f"{rows.where(before + at)}: {values[at].as_py()!r} in {column!r} is not a finite number")
        if distinct:
            seen |= set(compute.unique(values).to_pylist())
        if len(seen) > _MAX_LABELS:
            raise ValueError(f"{rows.where(before)}: {column!r} has over {_MAX_LABELS:,} different classes: too many")
        before += len(array)
    return sorted(seen)


def _first_non_number(values: Any) -> int | None:
    for at, value in enumerate(values.to_pylist()):
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if not finite:
            return at
    return None
