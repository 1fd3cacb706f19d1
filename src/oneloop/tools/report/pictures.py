"""Pictures of samples: as PNG for examples.json and the report, and as sheets for trackers."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

_SHORT = 160  # pixels of a picture's shorter side, at most
_LONG = 480  # pixels of its longer side, at most
_HUES = (67, 113, 191)  # red, green and blue of class 1 of a mask; class 2 has twice these
_PICTURES: dict[str, dict[str, str]] = {
    "tensorboard": {"dataformats": "NHWC"},
    "wandb": {},
    "swanlab": {},
}
"""trackers of accelerate that take a list of pictures, and their arguments"""


def data_url(image: Any, *, mask: bool = False) -> str:
    """Return an image of any range as a PNG in a data URL; shrink a large one.

    Args:
        image: (channels, height, width) or (height, width).
        mask: whether two-dimensional whole numbers are classes, which get a colour each (0: black).

    Raises:
        ValueError: it has another shape.
    """
    values = torch.as_tensor(image).detach().cpu()
    if values.ndim not in (2, 3) or not values.numel():
        raise ValueError(
            f"an image of shape {tuple(values.shape)}; (channels, height, width) is needed"
        )

    # Colour the classes of a mask. Scale others to the full range.
    if mask and values.ndim == 2 and not values.is_floating_point():
        hues = torch.tensor(_HUES)[:, None, None]
        values = (values.long() * hues % 256).float()
    else:
        values = values.float().reshape(-1, *values.shape[-2:])
        channels = 3 if len(values) >= 3 else 1
        values = values[:channels].expand(3, -1, -1)
        low, high = values.aminmax()
        span = (high - low).clamp(min=1e-12)
        values = 255 * (values - low) / span

    # Shrink it, and write it.
    short, long = sorted(values.shape[1:])
    scale = min(1.0, _SHORT / short, _LONG / long)
    size = [max(1, round(scale * pixels)) for pixels in values.shape[1:]]
    values = functional.interpolate(values[None], size, mode="area")[0]
    levels = values.round().byte()
    picture = levels.permute(1, 2, 0).contiguous()
    data = io.BytesIO()
    Image.fromarray(picture.numpy()).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def log_samples(tracker: Any, examples: Mapping[str, Any]) -> None:
    """Log samples and matrices in the way that a tracker of accelerate supports.

    Args:
        tracker: pictures go to TensorBoard, wandb and swanlab; texts to TensorBoard, and to those
            that have tables.
        examples: the content of examples.json.
    """
    from jinja2 import Environment, FileSystemLoader

    # The texts are Markdown, with the samples' own texts as blocks of code.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    markdown: Any = environment.get_template("samples.md").module

    # Names of EMA weights begin with the name of the EMA, as those of metrics do.
    step = examples["step"]
    weights = examples["weights"]
    head = "examples" if weights == "raw" else f"{weights}/examples"
    texts = {}
    sheets: dict[str, list[str]] = {}
    for name, matrix in examples["matrices"].items():
        rows = zip(matrix["rows"], matrix["counts"], strict=True)
        texts[f"{head}/{name}"] = markdown.matrix(matrix["columns"], rows)
    for name, worst in (("fixed", False), ("worst", True)):
        samples = [sample for sample in examples["samples"] if sample["worst"] == worst]
        if samples:
            texts[f"{head}/{name}"] = "\n\n".join(map(markdown.sample, samples))

        # Collect all images, and all masks.
        for sample in samples:
            for part, url in sample["parts"].items():
                sheets.setdefault(f"{head}/{name}/{part}", []).append(url)

    # Log them.
    if tracker.name in _PICTURES:
        for tag, urls in sheets.items():
            sheet = {tag: _sheet(urls)}
            tracker.log_images(sheet, step=step, **_PICTURES[tracker.name])
    if tracker.name == "tensorboard":
        tracker.log(texts, step=step)
    elif hasattr(tracker, "log_table"):
        lines = list(map(list, texts.items()))
        tracker.log_table("examples", columns=["which", "text"], data=lines, step=step)


def _sheet(urls: Sequence[str]) -> NDArray[np.uint8]:
    """Return pictures as (number, height, width, 3), with white margins below and at the right."""
    pictures = []
    for url in urls:
        data = base64.b64decode(url.partition(",")[2])
        opened = Image.open(io.BytesIO(data))
        pictures.append(np.asarray(opened))
    height = max(len(picture) for picture in pictures)
    width = max(len(picture[0]) for picture in pictures)
    sheet = np.full((len(pictures), height, width, 3), 255, np.uint8)
    for place, picture in zip(sheet, pictures, strict=True):
        place[: len(picture), : len(picture[0])] = picture
    return sheet
