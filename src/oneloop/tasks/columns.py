"""What a task wants of the columns of people's rows, checked before anything is trained on."""

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

_LOOKED = 2  # raised where the same column is judged otherwise than before
_MOST = 100_000  # distinct values of a column of labels


def columns_of(sources: Sequence[Source], key: str) -> Iterator[tuple[Source, str, Any, str]]:
    """Yield each source and split that has the column of this key: (source, split, rows, name of the column)."""
    for source in sources:
        if column := source.columns[key]:
            for part, rows in [*source.parts.items()]:
                yield source, part, rows, column


def rejected(source: Source, key: str, kind: Any, wanted: str) -> ValueError:
    """The error that says what a column holds, and what is needed."""
    column = source.columns[key]
    return ValueError(f"{source.where}: {column!r} holds {named(kind)}; expected {wanted}; set task.{key} to another")


def check_texts(sources: Sequence[Source], key: str) -> None:
    """Raise ValueError if the column of this key holds anything but text, or a row has none."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(rows.types[column]):
            raise rejected(source, key, rows.types[column], "text is needed")
        values_of(rows, column, distinct=False)


def check_words(sources: Sequence[Source], key: str) -> None:
    """As :func:`check_texts`, of lists of texts, none of them empty."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(inside(rows.types[column])):
            raise rejected(source, key, rows.types[column], "lists of texts are needed")
        values_of(rows, column, distinct=False)


def check_as_long(sources: Sequence[Source], one: str, other: str) -> None:
    """Raise ValueError if the lists of two columns (by key) differ in length in a row."""
    from pyarrow import compute

    for source in sources:
        for rows in source.parts.values():
            with alone(f"values/{key_of(rows.fingerprint(), source.columns[one], source.columns[other])}.ok") as kept:
                before = 0
                pairs = () if kept.exists() else zip(*(rows.values(source.columns[key]) for key in (one, other)))
                for first, second in pairs:
                    lengths = [compute.list_value_length(one).to_numpy(zero_copy_only=False) for one in (first, second)]
                    if len(wrong := np.flatnonzero(lengths[0] != lengths[1])):
                        a, b = (int(several[wrong[0]]) for several in lengths)
                        apart = f"{a} {source.columns[one]} and {b} {source.columns[other]}"
                        raise ValueError(f"{rows.where(before + int(wrong[0]))}: {apart}; each needs one of the other")
                    before += len(first)
                kept.touch()


def check_numbers(sources: Sequence[Source], key: str) -> None:
    """As :func:`check_texts`, of finite numbers, or of texts that are some."""
    for source, _, rows, column in columns_of(sources, key):
        kind = rows.types[column]
        plain = inside(kind) is None and str(getattr(kind, "dtype", "")).startswith(("float", "int", "uint"))
        if not plain and not is_text(kind):
            raise rejected(source, key, kind, "a number is needed")
        values_of(rows, column, distinct=False, numbers=True)


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    plain = inside(kind) is None and getattr(kind, "id", None) != OBJECTS
    return plain and getattr(kind, "dtype", None) in ("string", "large_string")


def inside(kind: Any) -> Any:
    """What a column of lists holds in them; None where it holds no lists."""
    if isinstance(kind, list) and len(kind) == 1:
        return kind[0]
    return getattr(kind, "feature", None)


def named(kind: Any) -> str:
    """What a column holds, for a person."""
    if isinstance(kind, Mapping):
        return f"objects of {', '.join(kind)}"
    if inside(kind) is not None:
        return f"lists of {named(inside(kind)).removeprefix('values of ')}"
    if getattr(kind, "id", None) == OBJECTS:
        return OBJECTS
    return f"values of {getattr(kind, 'dtype', type(kind).__name__)}"


def is_image(kind: Any) -> bool:
    """Whether a column of this type may hold images: ``Image`` of ``datasets``, bytes, or objects of bytes and path."""
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    return type(kind).__name__ == "Image" or getattr(kind, "dtype", None) in ("binary", "large_binary")


def decoded(value: Any, *, limit: int) -> Any:
    """Decode a stored image to RGB. Raises ValueError if it is damaged, or has more pixels than the limit."""
    from PIL import Image

    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    if data is None and path is None:
        raise ValueError("the image is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the key is the limit
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
    """Return the distinct values of a column (of lists: in them), cached by the rows' content. Without ``distinct``,
    only check that each row has one; with ``numbers``, each must be a finite number or its text. Raises ValueError."""
    with alone(f"values/{key_of(_LOOKED, rows.fingerprint(), column, distinct, numbers)}.json") as kept:
        if not kept.exists():
            values = _looked_through(rows, column, distinct=distinct, numbers=numbers)
            with replacing(kept) as draft:
                draft.write_text(json.dumps(values))
        known: list[Any] = json.loads(kept.read_text())
        return known


def _looked_through(rows: Any, column: str, *, distinct: bool, numbers: bool) -> list[Any]:
    from pyarrow import compute

    kind = inside(rows.types[column]) or rows.types[column]
    seen: set[Any] = set()
    before = 0
    for array in rows.values(column):
        lists = hasattr(array, "flatten") and inside(rows.types[column]) is not None
        values = array.flatten() if lists else array
        lacking = values.is_null()
        if hasattr(kind, "names"):  # -1 says that there is no label
            lacking = compute.or_(lacking, compute.less(compute.fill_null(values, -1), 0))
        elif distinct and is_text(kind):
            lacking = compute.or_(lacking, compute.equal(compute.fill_null(values, ""), ""))
        wrong = array.is_null().to_numpy(zero_copy_only=False)
        if lists:
            lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            row_of = np.repeat(np.arange(len(array)), lengths)
            wrong = wrong | (lengths == 0)
            wrong[row_of[lacking.to_numpy(zero_copy_only=False)]] = True
        else:
            wrong = wrong | lacking.to_numpy(zero_copy_only=False)
        if wrong.any():
            place = rows.where(before + int(np.argmax(wrong)))
            raise ValueError(f"{place} has nothing in {column!r}; fill it, or remove the row")
        if numbers and (at := _no_number(values)) is not None:
            raise ValueError(f"{rows.where(before + at)}: {values[at].as_py()!r} in {column!r} is not a finite number")
        if distinct:
            seen |= set(compute.unique(values).to_pylist())
        if len(seen) > _MOST:
            raise ValueError(f"{rows.where(before)}: {column!r} has over {_MOST:,} different values: no classes")
        before += len(array)
    return sorted(seen)


def _no_number(values: Any) -> int | None:
    for at, value in enumerate(values.to_pylist()):
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if not finite:
            return at
    return None
