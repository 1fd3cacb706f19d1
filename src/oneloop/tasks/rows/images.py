"""Images in rows: decode them to RGB, and check all of them before a run, once and on all cores."""

import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.rows.cached_arrays import Ragged, ragged, remark
from oneloop.tasks.rows.rows import Row, Rows, Unreadable

_VERSION = 4  # version of the check; increase it if its result for the same image changes
TURNED = "turned"  # subject of remarks about images that are turned by their EXIF orientation
_CONVERTED = {
    "CMYK": "CMYK",
    "RGBA": "RGBA",
    "PA": "RGBA",
    "LA": "grayscale with alpha",
    "P": "palette",
    "L": "grayscale",
    "1": "black and white",
    "I;16": "16-bit",
    "I;16B": "16-bit",
    "I;16L": "16-bit",
    "I;16N": "16-bit",
}
"""kind of conversion by the mode of the stored image (Pillow's names)"""


def is_image(kind: Any) -> bool:
    """Return whether a column of this type may hold images.

    Args:
        kind: a feature of ``datasets``: ``Image``, bytes, or an object of bytes and path.
    """
    if isinstance(kind, Mapping):
        return set(kind) == {"bytes", "path"}
    if type(kind).__name__ == "Image":
        return True
    return getattr(kind, "dtype", None) in ("binary", "large_binary")


def labelled_image(
    columns: Mapping[str, str], number: Callable[[Any], Any], limit: int, row: Row
) -> tuple[Any, Any]:
    """Return the image of a row in RGB, turned as its EXIF orientation says, and its label.

    Args:
        columns: names of the columns ``image`` and ``label``.
        number: converts a stored label; a row to predict has none.
        limit: largest number of pixels of an image.
        row: the row.

    Raises:
        Unreadable: the image is damaged or has more pixels.
    """
    image = decoded(row[columns["image"]], limit).image
    return image, number(row.get(columns["label"], 0))


@dataclass(frozen=True)
class Decoded:
    """An image in RGB."""

    image: Any
    mode: str  # in which it is stored (Pillow's names)
    turned: bool  # by its EXIF orientation


def decoded(value: Any, limit: int) -> Decoded:
    """Decode an image to RGB (16 bits: / 257), turned as its EXIF orientation says.

    Args:
        value: the encoded bytes, or an object of bytes and path.
        limit: largest number of pixels.

    Raises:
        Unreadable: the image is damaged or has more pixels.
    """
    from PIL import Image

    data = value
    path = None
    if isinstance(value, Mapping):
        data = value.get("bytes")
        path = value.get("path")
    if data is None and path is None:
        raise Unreadable("the image is missing")
    try:
        with warnings.catch_warnings():
            # task.pixel_limit is the limit, not Pillow's.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(data) if data else str(path))
        with opened as image:
            pixels = image.width * image.height
            if pixels > limit:
                raise ValueError(
                    f"it has {image.width:,} x {image.height:,} = {pixels:,} pixels, more than "
                    f"task.pixel_limit {limit:,}; scale it down or raise the key"
                )
            mode = image.mode
            turned = _turn(image)
            converted: Any = image
            if mode.startswith("I;16"):
                # Pillow would clip 16 bits to 8; 65,535 = 257 x 255.
                wide = np.asarray(image).astype(np.uint32)
                converted = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
            elif mode.startswith(("I", "F")):
                raise ValueError(
                    f"its pixels ({mode}) have more than 16 bits; write it with 8 or 16"
                )
            return Decoded(converted.convert("RGB"), mode, turned)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = path or "the image"
        raise Unreadable(f"{what} cannot be read as an image: {error}") from error


def _turn(image: Any) -> bool:
    """Turn an open image by its EXIF orientation; return whether it was turned."""
    from PIL import ExifTags, ImageOps

    image.load()  # Pillow turns TIFF files itself
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # damaged EXIF, for which Pillow raises many kinds of errors
        return False
    return orientation in range(2, 9)


def checked_images(rows: Rows, column: str, *, limit: int, what: str) -> Ragged:
    """Decode the images of all rows; cached by the rows' content.

    The subjects of the remarks are the kinds of converted images, and :data:`TURNED`.

    Args:
        rows: the rows.
        column: the column of the images.
        limit: largest number of pixels of an image.
        what: label of the progress bar.
    """
    processes = os.cpu_count() or 1
    made = ragged(
        rows,
        partial(_check, column, limit),
        made_by=["images", _VERSION, column, limit],
        what=f"checking {what}",
        skip=True,
        chunk=max(1, min(500, len(rows) // (4 * processes))),
        empty=True,
    )
    bad = [(index, _reason(rows[index][column], limit) or why) for index, why in made.skipped]
    return replace(made, skipped=bad)


def _check(column: str, limit: int, row: Row) -> NDArray[np.int32]:
    """Decode an image, and remark what is unusual about it."""
    image = decoded(row[column], limit)
    if image.mode != "RGB":
        remark(_CONVERTED.get(image.mode, "other"), "")
    if image.turned:
        remark(TURNED, "")
    return np.zeros(0, np.int32)


def _reason(value: Any, limit: int) -> str:
    """Return why an image cannot be read.

    The cached reason may name another path, which the file had then.
    """
    try:
        decoded(value, limit)
    except ValueError as error:
        return str(error)
    return ""
