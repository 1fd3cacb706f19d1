"""Images in rows: decode them to RGB, and check all of them before a run, once and on all cores."""

import io
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.rows.cached_arrays import ragged
from oneloop.data.rows.find_files import KINDS, SPLITS
from oneloop.data.rows.rows import Row, Rows

_VERSION = 2  # version of the check; increase it if its result for the same image changes
_CONVERTED = {
    "CMYK": "CMYK",
    "RGBA": "RGBA",
    "PA": "RGBA",
    "LA": "grayscale with alpha",
    "P": "palette",
}
_CONVERTED |= {"L": "grayscale", "1": "black and white"} | dict.fromkeys(
    ("I;16", "I;16B", "I;16L", "I;16N"), "16-bit"
)
_MODES = ("RGB", *_CONVERTED)  # their indices are cached; others are counted as "other"


def is_image(kind: Any) -> bool:
    """Whether a column of this type may hold images: ``Image`` of ``datasets``, bytes, or objects
    of bytes and path."""
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    return type(kind).__name__ == "Image" or getattr(kind, "dtype", None) in (
        "binary",
        "large_binary",
    )


def decoded(value: Any, *, limit: int) -> Any:
    """Decode an image to RGB (16 bits: / 257). Raise ValueError if it is damaged or has more than
    ``limit`` pixels."""
    return _read(value, limit)[0]


def _read(value: Any, limit: int) -> tuple[Any, str]:
    """Return an image in RGB, and the mode in which it is stored."""
    from PIL import Image

    data, path = (
        (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    )
    if data is None and path is None:
        raise ValueError("the image is missing")
    try:
        with warnings.catch_warnings():
            # task.pixel_limit is the limit
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data) if data else str(path))
        with opened as image:
            if image.width * image.height > limit:
                size = f"{image.width:,} x {image.height:,} = {image.width * image.height:,} pixels"
                raise ValueError(
                    f"it has {size}, more than task.pixel_limit {limit:,}; scale it down or "
                    "raise the key"
                )
            if image.mode.startswith("I;16"):
                wide = np.asarray(image).astype(np.uint32)
                return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert(
                    "RGB"
                ), image.mode
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"its pixels ({image.mode}) have more than 16 bits; write it with 8 or 16"
                )
            return image.convert("RGB"), image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path or 'the image'} cannot be read as an image: {error}") from error


@dataclass(frozen=True)
class Checked:
    """The result of a check: index and reason of each image that cannot be used; number of
    conversions by kind."""

    unusable: list[tuple[int, str]]
    converted: dict[str, int]

    @property
    def indices(self) -> NDArray[np.int64]:
        return np.array([index for index, _ in self.unusable], dtype=np.int64)


def checked_images(rows: Rows, column: str, *, limit: int, what: str) -> Checked:
    """Decode the images of all rows; cached by the rows' content. ``what`` labels the progress
    bar."""

    def mode(row: Row) -> NDArray[np.int32]:
        stored = _read(row[column], limit)[1]
        return np.array([_MODES.index(stored) if stored in _MODES else len(_MODES)], dtype=np.int32)

    shard = max(1, min(500, len(rows) // (4 * (os.cpu_count() or 1))))
    key = ["images", _VERSION, column, limit]
    made = ragged(
        rows, mode, made_by=key, what=f"checking {what}", skip=True, shard=shard, empty=True
    )
    kinds = Counter[str]()
    for kind, count in zip(
        [*_CONVERTED.values(), "other"], np.bincount(made.values, minlength=99)[1:], strict=False
    ):
        kinds[kind] += int(count)
    bad = [(index, _reason(rows[index][column], limit) or why) for index, why in made.skipped]
    return Checked(bad, {kind: kinds[kind] for kind in sorted(kinds) if kinds[kind]})


def _reason(value: Any, limit: int) -> str:
    """Return why an image cannot be read: the cache may have been written when the file had another
    path."""
    try:
        _read(value, limit)
    except ValueError as error:
        return str(error)
    return ""


def empty_classes(root: Path) -> list[Path]:
    """Return the folders of an image data set that hold neither data nor folders: classes without
    images."""
    found, root = [], root.expanduser()
    for folder, inside, names in os.walk(root, followlinks=True):
        inside[:] = [name for name in inside if not name.startswith(".")]
        data = any(Path(name).suffix.lower() in KINDS for name in names)
        if (
            not inside
            and not data
            and Path(folder) != root
            and Path(folder).name.lower() not in SPLITS
        ):
            found.append(Path(folder))
    return sorted(found)
