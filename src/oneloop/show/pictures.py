"""Samples and tables as pictures: for the report's page, and for trackers that take images."""

import base64
import colorsys
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

_SHORT = 160  # pixels of a shown image's shorter side
_LONG = 480  # pixels of its longer side, at most
_ACROSS = 1408  # pixels of a row of samples
_LINE = 15  # pixels of a line of text
_CELL = 34  # pixels of a cell with a number

# colours
_GOOD = (24, 110, 60)
_BAD = (180, 35, 45)
_INK = (30, 36, 48)


def picture(image: Tensor, *, mask: bool = False) -> Image.Image:
    """Convert a tensor to an image; scale its values to the full range, and small images up.

    Its shorter side gets 160 pixels or, if the image is small, up to twice as many. The longer side
    has at most 480.

    Args:
        image: (channels, height, width) or (height, width).
        mask: whether two-dimensional whole numbers are classes, which get a colour each.
    """
    values = _rgb(image) if mask else _scaled(image)
    levels = (values * 255).round().byte()
    if len(levels) == 1:
        drawn = Image.fromarray(levels[0].numpy())
    else:
        drawn = Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy())

    # Shrink a large image. Repeat the pixels of a small one.
    short, long = sorted(drawn.size)
    scale = min(_SHORT / short, _LONG / long)
    if scale < 1:
        width = max(1, round(drawn.width * scale))
        height = max(1, round(drawn.height * scale))
        drawn.thumbnail((width, height))
    else:
        factor = min(math.ceil(_SHORT / short), _LONG // long)
        width = drawn.width * factor
        height = drawn.height * factor
        drawn = drawn.resize((width, height), Image.Resampling.NEAREST)
    return drawn


def _scaled(image: Tensor) -> Tensor:
    """Return (1 or 3, height, width) on the CPU, with values from 0 to 1."""
    values = image.detach().float().cpu()
    if values.ndim == 2:
        values = values[None]
    elif len(values) >= 3:
        values = values[:3]
    else:
        values = values[:1]
    low, high = values.amin(), values.amax()
    return (values - low) / (high - low).clamp(min=1e-12)


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Return images and masks from left to right, as high as the highest: (3, height, width).

    Each is scaled to its own range. A two-dimensional tensor of whole numbers is a mask, whose
    classes get a colour each (0: black).

    Args:
        images: each (channels, height, width) or (height, width).
    """
    drawn = [_rgb(image) for image in images]
    height = max(len(one[0]) for one in drawn)
    gap = torch.ones(3, height, max(1, height // 32))
    parts: list[Tensor] = []
    for one in drawn:
        width = max(1, round(one.shape[2] * height / one.shape[1]))
        parts += [gap, functional.interpolate(one[None], (height, width))[0]]
    return torch.cat(parts[1:], dim=2)


def _rgb(image: Tensor) -> Tensor:
    """Return (3, height, width) with values from 0 to 1."""
    if image.ndim != 2 or image.is_floating_point():
        return _scaled(image).expand(3, -1, -1)
    classes = image.long().cpu() - min(0, int(image.min()))
    colours = [(0.0, 0.0, 0.0)]
    for number in range(int(classes.max())):
        # Steps of the golden ratio keep the hues of near classes apart.
        colours.append(colorsys.hsv_to_rgb(0.618 * number % 1, 0.7, 0.95))
    return torch.tensor(colours)[classes].permute(2, 0, 1)


def data_url(image: Tensor, *, mask: bool = False) -> str:
    """Return what :func:`picture` draws as a PNG in a data URL."""
    data = io.BytesIO()
    picture(image, mask=mask).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def tiles(samples: Sequence[Mapping[str, Any]]) -> NDArray[np.uint8]:
    """Draw samples in rows of at most 8, each above its target and prediction: (height, width, 3).

    Args:
        samples: each has an "image".
    """
    drawn = [picture(sample["image"]) for sample in samples]
    width = max(90, *(image.width for image in drawn)) + 8
    height = max(image.height for image in drawn) + 2 * _LINE + 10
    columns = max(1, min(8, len(drawn), _ACROSS // width))
    rows = math.ceil(len(drawn) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for index, (sample, image) in enumerate(zip(samples, drawn, strict=True)):
        row, column = divmod(index, columns)
        x = column * width + 4
        y = row * height + 4
        sheet.paste(image, (x, y))

        # Write the target below the image, and below it the prediction in a colour.
        colour = _INK
        if "right" in sample:
            colour = _GOOD if sample["right"] else _BAD
        y += image.height + 1
        if "target" in sample:
            pen.text((x, y), f"label {sample['target']}"[:14], fill=_INK, font=font)
        if "prediction" in sample:
            text = f"model {sample['prediction']}"[:14]
            pen.text((x, y + _LINE), text, fill=colour, font=font)
    return np.asarray(sheet)


def matrix(table: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Draw a matrix of counts, with the share of the row as shade: (height, width, 3).

    Args:
        table: ``rows`` and ``columns``, their names, and ``counts``.
    """
    rows = table["rows"]
    columns = table["columns"]
    counts = np.asarray(table["counts"], dtype=float)
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    cell = _CELL
    if max(len(rows), len(columns)) > 30:
        cell = 8
    left = 80  # pixels of the margins
    top = left // 2
    width = left + len(columns) * cell
    height = top + len(rows) * cell
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for row in range(len(rows)):
        y = top + row * cell
        for column in range(len(columns)):
            x = left + column * cell
            shade = shares[row, column]
            colour = _GOOD if rows[row] == columns[column] else _BAD
            ground = [round(255 - shade * (255 - part)) for part in colour]
            box = (x, y, x + cell - 2, y + cell - 2)
            pen.rectangle(box, fill=tuple(ground))
            if cell == _CELL and counts[row, column]:
                ink = "white" if shade > 0.5 else _INK
                count = f"{counts[row, column]:.3g}"
                pen.text((x + 3, y + 8), count, fill=ink, font=font)

    # Name the rows at the left, and the columns above them.
    if cell == _CELL:
        for row, name in enumerate(rows):
            y = top + row * cell + 8
            pen.text((4, y), name[:12], fill=_INK, font=font)
        for column, name in enumerate(columns):
            x = left + column * cell + 2
            pen.text((x, top - 16), name[:5], fill=_INK, font=font)
    if rows == columns:
        pen.text((4, 4), "rows: label, columns: prediction", fill=_INK, font=font)
    return np.asarray(sheet)
