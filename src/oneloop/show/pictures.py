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

_SIDE = 160  # pixels of a shown image's longer side, at most
_LINE = 15
_CELL = 34
_GOOD, _BAD, _INK = (24, 110, 60), (180, 35, 45), (30, 36, 48)


def picture(image: Tensor) -> Image.Image:
    """Convert (channels, height, width) or (height, width) to an image; scale values, and small
    images up."""
    values = image.detach().float().cpu()
    values = values[None] if values.ndim == 2 else values[:3] if len(values) >= 3 else values[:1]
    low, high = values.amin(), values.amax()
    levels = ((values - low) / (high - low).clamp(min=1e-12) * 255).round().byte()
    drawn = Image.fromarray(
        levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).contiguous().numpy()
    )
    longest = max(drawn.size)
    if longest > _SIDE:
        drawn.thumbnail((_SIDE, _SIDE))
    elif factor := _SIDE // longest:
        drawn = drawn.resize(
            (drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST
        )
    return drawn


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Return images and masks from left to right, as high as the highest, each over its own range:
    (3, height, width).

    A two-dimensional tensor of whole numbers is a mask, whose classes get a colour each (0:
    black)."""
    drawn = [_rgb(image) for image in images]
    height = max(len(one[0]) for one in drawn)
    sized = [
        functional.interpolate(
            one[None], (height, max(1, round(one.shape[2] * height / one.shape[1])))
        )[0]
        for one in drawn
    ]
    gap = torch.ones(3, height, max(1, height // 32))
    return torch.cat([part for one in sized for part in (gap, one)][1:], dim=2)


def _rgb(image: Tensor) -> Tensor:
    if image.ndim == 2 and not image.is_floating_point():
        classes = image.long().cpu() - min(0, int(image.min()))
        colours = [(0.0, 0.0, 0.0)] + [
            colorsys.hsv_to_rgb(0.618 * n % 1, 0.7, 0.95) for n in range(int(classes.max()))
        ]
        return torch.tensor(colours)[classes].permute(2, 0, 1)
    values = image.detach().float().cpu()
    values = values[None] if values.ndim == 2 else values[:3] if len(values) >= 3 else values[:1]
    low, high = values.amin(), values.amax()
    return ((values - low) / (high - low).clamp(min=1e-12)).expand(3, -1, -1)


def data_url(image: Tensor) -> str:
    """Return the image as a PNG in a data URL."""
    data = io.BytesIO()
    picture(image).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def tiles(samples: Sequence[Mapping[str, Any]]) -> NDArray[np.uint8]:
    """Draw samples with an "image" in rows of 8, each above its target and prediction: (height,
    width, 3)."""
    drawn = [picture(sample["image"]) for sample in samples]
    width = max(90, *(image.width for image in drawn)) + 8
    height = max(image.height for image in drawn) + 2 * _LINE + 10
    columns = min(8, len(drawn))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(drawn) / columns) * height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for index, (sample, image) in enumerate(zip(samples, drawn, strict=True)):
        x, y = index % columns * width + 4, index // columns * height + 4
        sheet.paste(image, (x, y))
        colour = (_GOOD if sample["right"] else _BAD) if "right" in sample else _INK
        for line, (name, word, ink) in enumerate(
            (("target", "label", _INK), ("prediction", "model", colour))
        ):
            if name in sample:
                text = f"{word} {sample[name]}"[:14]
                pen.text((x, y + image.height + 1 + line * _LINE), text, fill=ink, font=font)
    return np.asarray(sheet)


def matrix(confusion: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Draw a confusion matrix; rows are the true classes, shades the share of the row: (height,
    width, 3)."""
    classes, counts = confusion["classes"], np.asarray(confusion["counts"], dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = len(classes)
    cell = _CELL if size <= 30 else 8
    margin = 80
    sheet = Image.new("RGB", (margin + size * cell, margin // 2 + size * cell), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for row in range(size):
        for column in range(size):
            shade, x, y = shares[row, column], margin + column * cell, margin // 2 + row * cell
            right = row == column
            ground = tuple(round(255 - shade * (255 - part)) for part in (_GOOD if right else _BAD))
            pen.rectangle((x, y, x + cell - 2, y + cell - 2), fill=ground)
            if cell == _CELL and counts[row, column]:
                pen.text(
                    (x + 3, y + 8),
                    f"{counts[row, column]:.0f}",
                    fill="white" if shade > 0.5 else _INK,
                    font=font,
                )
        if cell == _CELL:
            pen.text((4, margin // 2 + row * cell + 8), classes[row][:12], fill=_INK, font=font)
            pen.text(
                (margin + row * cell + 2, margin // 2 - 16), classes[row][:5], fill=_INK, font=font
            )
    pen.text((4, 4), "rows: label, columns: prediction", fill=_INK, font=font)
    return np.asarray(sheet)
