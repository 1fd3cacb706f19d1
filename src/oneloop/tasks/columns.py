"""What a task wants of the columns of people's rows, checked before anything is trained on."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oneloop.basics.files import replacing
from oneloop.data.rows.cache import alone, key_of
from oneloop.data.rows.sources import Source

_MOST = 100_000
"""distinct values of a column of labels"""


def columns_of(sources: Sequence[Source], key: str) -> Iterator[tuple[Source, str, Any, str]]:
    """Each source and part that has the column: (source, part, rows, name of the column).

    Args:
        sources: opened.
        key: the task's own name of the column.
    """
    for source in sources:
        if column := source.columns[key]:
            for part, rows in [*source.parts.items()]:
                yield source, part, rows, column


def refused(source: Source, key: str, kind: Any, wanted: str) -> ValueError:
    """The error that says what a column holds, and what is needed."""
    column = source.columns[key]
    return ValueError(
        f"{source.where}: {column!r} holds {named(kind)}, and {wanted}; name another column with task.{key}"
    )


def check_texts(sources: Sequence[Source], key: str) -> None:
    """Refuses a column that holds anything but text.

    Args:
        sources: opened.
        key: the task's own name of the column.

    Raises:
        ValueError: names the place, the column and what it holds; or a row without a text.
    """
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(rows.types[column]):
            raise refused(source, key, rows.types[column], "text is needed")
        values_of(rows, column, distinct=False)


def check_words(sources: Sequence[Source], key: str) -> None:
    """As :func:`check_texts`, of lists of texts."""
    for source, _, rows, column in columns_of(sources, key):
        if not is_text(inside(rows.types[column])):
            raise refused(source, key, rows.types[column], "lists of texts are needed")
        values_of(rows, column, distinct=False)


def check_numbers(sources: Sequence[Source], key: str) -> None:
    """As :func:`check_texts`, of numbers."""
    for source, _, rows, column in columns_of(sources, key):
        kind = rows.types[column]
        if inside(kind) is not None or not str(getattr(kind, "dtype", "")).startswith(("float", "int", "uint")):
            raise refused(source, key, kind, "a number is needed")
        values_of(rows, column, distinct=False)


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds text."""
    return inside(kind) is None and getattr(kind, "dtype", None) in ("string", "large_string")


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
    return f"values of {getattr(kind, 'dtype', type(kind).__name__)}"


def is_image(kind: Any) -> bool:
    """Whether a column of this type may hold images: ``Image`` of ``datasets``, bytes, or objects of bytes and path."""
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    return type(kind).__name__ == "Image" or getattr(kind, "dtype", None) in ("binary", "large_binary")


def decoded(value: Any) -> Any:
    """A stored image as an RGB image of PIL.

    Raises:
        ValueError: it is none, or not whole.
    """
    from PIL import Image

    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    try:
        with Image.open(io.BytesIO(data) if data else str(path)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path or 'the image'} cannot be read as an image: {error}") from error


def values_of(rows: Any, column: str, *, distinct: bool = True) -> Sequence[Any]:
    """The distinct values of a column (of lists: in them), kept by the rows' content.

    Raises:
        ValueError: a row holds none, or too many are distinct.
    """
    with alone(f"values/{key_of(rows.fingerprint(), column, distinct)}.json") as kept:
        if not kept.exists():
            values = _looked_through(rows, column, distinct=distinct)
            with replacing(kept) as draft:
                draft.write_text(json.dumps(values))
        known: list[Any] = json.loads(kept.read_text())
        return known


def _looked_through(rows: Any, column: str, *, distinct: bool) -> list[Any]:
    import pyarrow
    from pyarrow import compute

    kind = inside(rows.types[column]) or rows.types[column]
    seen: set[Any] = set()
    before = 0
    for array in rows.values(column):
        lists = pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type)
        values = compute.list_flatten(array) if lists else array
        lacking = values.is_null()
        if hasattr(kind, "names"):  # -1 says that there is no label
            lacking = compute.or_(lacking, compute.less(compute.fill_null(values, -1), 0))
        at = int(compute.index(array.is_null(), True).as_py())
        if at < 0 and (inner := int(compute.index(lacking, True).as_py())) >= 0:
            at = int(compute.list_parent_indices(array)[inner].as_py()) if lists else inner
        if at >= 0:
            raise ValueError(f"{rows.where(before + at)} has nothing in {column!r}; fill it, or leave the row out")
        if distinct:
            seen |= set(compute.unique(values).to_pylist())
        if len(seen) > _MOST:
            raise ValueError(f"{rows.where(before)}: {column!r} has over {_MOST:,} different values: no classes")
        before += len(array)
    return sorted(seen)
