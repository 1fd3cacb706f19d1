"""The settings of image classification: model, augmentation, resizing, columns, data and loss."""

import math
from dataclasses import dataclass
from typing import Literal

from oneloop.tasks.rows.open_data import SplitBy, Unreadable

Interpolation = Literal["nearest", "bilinear", "bicubic"]
"""how the pixels of a resized image are interpolated"""
Pretrained = bool | str | None
"""no weights, the public weights, or a file or folder with weights"""
_MAX_ALPHA = 100  # largest Beta parameter: 1 is uniform; at 100 nearly all shares are near 0.5


@dataclass(frozen=True)
class Resizing:
    """How an image is resized to a square.

    Args:
        size: pixels a side.
        interpolation: how its pixels are interpolated.
        center: resize the shorter side to ``size / center`` pixels, and crop the middle, as timm
            does with its ``crop_pct``; 0: resize both sides to ``size``.
        rounds_down: the position of the middle is rounded down, as in transformers; torchvision and
            timm round half a pixel to an even number.
    """

    size: int
    interpolation: Interpolation = "bilinear"
    center: float = 0.0
    rounds_down: bool = False

    @property
    def shorter_side(self) -> int:
        """The shorter side of the resized image, of which the middle is cropped, in pixels."""
        return math.floor(self.size / self.center)


@dataclass(frozen=True)
class ImageSettings:
    """The keys of image classification, apart from its data and its model.

    Raises:
        ValueError: a value is out of range, or two of them exclude each other.
    """

    # The model.
    pretrained: Pretrained = None
    """a .safetensors file, a folder with one, or true for the public weights of the model (a folder
    or hf: loads its weights unless this is false). If the classes differ, the last layer is
    re-initialized."""
    trust_remote_code: bool = False
    """run Python code stored with the weights (only if you trust the author)."""
    width: int = 32
    """channels of the first layer (cnn)."""

    # Random changes of training images, in the order in which they are applied, and copies.
    augment: bool = True
    """randomly shift and mirror the training images."""
    mirror: bool | None = None
    """randomly mirror the training images (null: as augment, but not for digits and letters)."""
    crop: float = 0.0
    """random resized crops instead of shifts: the minimum share of the image (0.08 for large data
    sets; 0: off)."""
    crop_max: float = 1.0
    """maximum share of the image of a random crop."""
    crop_ratio: list[float] | None = None
    """smallest and largest width / height of a random crop, before it is resized to a square (null:
    3/4 and 4/3)."""
    randaugment: int = 0
    """RandAugment magnitude of two operations, 1 to 30 (common: 9; 0: off)."""
    trivialaugment: bool = False
    """one operation of TrivialAugment (wide), with a random magnitude."""
    color_jitter: float | list[float] = 0.0
    """strength of random changes of brightness, contrast and saturation (0.4: factors from 0.6 to
    1.4), or a list of three or four strengths, of which the fourth is that of the hue (at most
    0.5)."""
    erasing: float = 0.0
    """probability of random erasing (common: 0.25)."""
    mixup: float = 0.0
    """alpha of mixup (common: 0.2; 0: off)."""
    cutmix: float = 0.0
    """alpha of cutmix (common: 1.0; 0: off). With both, each image gets one of them."""
    repeats: int = 1
    """copies of each image in a step, with different augmentations (repeated augmentation; common:
    3). A step has batch.size / repeats images. An epoch has as many samples as the data set, and so
    a share 1 / repeats of its images."""

    # Resizing, and the pixels.
    image_size: int = 64
    """side in pixels to which your own images are resized."""
    interpolation: Interpolation = "bilinear"
    """how the pixels of resized images are interpolated."""
    test_size: int = 0
    """side in pixels for evaluation (0: image_size)."""
    test_crop: float = 0.0
    """for evaluation, resize the shorter side to test_size / test_crop, and crop the middle
    (crop_pct in timm; common: 0.875; 0: resize the whole image to a square)."""
    test_interpolation: Interpolation | None = None
    """as interpolation, for evaluation (null: the same)."""
    mean: list[float] | None = None
    """mean of the pixels (0 to 1) by channel, to normalize your images (null: the model's values,
    else 0.5)."""
    std: list[float] | None = None
    """standard deviation of the pixels, likewise."""

    # The columns of the data, and how the data is read.
    image: str = "image"
    """column of the image."""
    label: str = "label"
    """column of the class, or of a list with the probability of each class."""
    class_weights: Literal["none", "balanced"] | list[float] = "none"
    """weight of each class in the loss: none, balanced (equal total weight for each class), or a
    list."""
    top_k: int = 0
    """also log the top-k accuracy (common: 5; 0: off)."""
    held_out: float = 0.05
    """share of the rows for each of validation and test, if the data set has no such split."""
    pixel_limit: int = 89_478_485
    """maximum pixels of an image; larger images are rejected before decoding."""
    unreadable: Unreadable = "stop"
    """stop if an image cannot be used (oneloop check lists them), or skip such images and list them
    in environment.json."""
    split_by: SplitBy = "rows"
    """what is drawn for missing splits: rows, by their content, or whole row groups of Parquet
    files, without reading them."""
    window: int = 256
    """megabytes of parquet rows in memory per process."""
    stream: bool = False
    """read hf:NAME in place, by ranges of its Parquet files, instead of a download."""
    root: str = "data"
    """folder of the downloaded data sets."""
    download: bool = False
    """download a missing data set."""

    # The loss.
    smoothing: float = 0.0
    """label smoothing."""
    dropout: float = 0.0
    """dropout before the last layer (cnn)."""

    def __post_init__(self) -> None:
        limits = {"crop": 1, "randaugment": 30, "erasing": 1}
        limits |= {"mixup": _MAX_ALPHA, "cutmix": _MAX_ALPHA}
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 0 <= value <= limit:
                raise ValueError(f"task.{name} {value} must be between 0 and {limit}")
        if not self.crop <= self.crop_max <= 1 or not self.crop_max:
            raise ValueError(
                f"task.crop_max {self.crop_max} must be above 0, at least task.crop {self.crop}, "
                "and at most 1"
            )
        ratio = self.ratio
        if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < math.inf:
            raise ValueError(
                f"task.crop_ratio {[*ratio]} must be the smallest and the largest width / height, "
                "both above 0; [0.75, 1.3333] is common"
            )
        if self.randaugment and self.trivialaugment:
            raise ValueError(
                f"task.randaugment {self.randaugment} and task.trivialaugment true exclude each "
                "other; remove one of them"
            )
        jitter = self.jitter
        in_range = len(jitter) == 4 and 0 <= min(jitter) <= max(jitter) < math.inf
        if not in_range or jitter[3] > 0.5:
            raise ValueError(
                f"task.color_jitter {self.color_jitter} must be one number from 0, or [brightness, "
                "contrast, saturation] or [brightness, contrast, saturation, hue]; the strength of "
                "hue must be between 0 and 0.5"
            )
        if self.repeats < 1:
            raise ValueError(f"task.repeats {self.repeats} must be 1 or more; 3 is common")
        if self.test_crop and not 0.1 <= self.test_crop <= 1:
            raise ValueError(
                f"task.test_crop {self.test_crop} must be between 0.1 and 1; 0.875 is common, and "
                "0 resizes the whole image to a square"
            )
        if not 0 <= self.smoothing < 1:
            raise ValueError(
                f"task.smoothing {self.smoothing} must be between 0 and 1; 0.1 is common"
            )

    @property
    def ratio(self) -> list[float]:
        """The smallest and the largest width / height of a random crop."""
        return [3 / 4, 4 / 3] if self.crop_ratio is None else self.crop_ratio

    @property
    def jitter(self) -> list[float]:
        """The strengths of brightness, contrast, saturation and hue."""
        strengths = self.color_jitter
        if not isinstance(strengths, list):
            strengths = [strengths] * 3
        return [*strengths, 0.0] if len(strengths) == 3 else strengths

    @property
    def needs_bytes(self) -> bool:
        """Whether an augmentation works on bytes, before they are normalized."""
        return bool(self.crop or self.randaugment or self.trivialaugment or any(self.jitter))

    def check_repeats(self) -> None:
        """Raise ValueError if the copies of an image would be equal."""
        changes = (self.augment, self.mirror, self.erasing, self.mixup, self.cutmix)
        if self.repeats > 1 and not self.needs_bytes and not any(changes):
            raise ValueError(
                f"task.repeats {self.repeats} would repeat equal images, because no augmentation "
                "is on; set one (task.crop 0.08), or remove task.repeats"
            )

    def check_effect(self) -> None:
        """Raise ValueError if an interpolation has no effect on packaged images."""
        is_tested = bool(self.test_crop or self.test_size)
        tested = self.test_interpolation or self.interpolation
        differ = tested != self.interpolation
        key = ""
        if differ and not is_tested:
            key = f"task.test_interpolation {tested}"
        elif self.interpolation != "bilinear" and not self.crop and (differ or not is_tested):
            key = f"task.interpolation {self.interpolation}"
        if key:
            raise ValueError(
                f"{key} has no effect, because these images of a packaged data set are not "
                "resized; remove it, or set task.crop or task.test_size"
            )


PLAIN = ImageSettings(augment=False, mirror=False)
"""settings without any augmentation"""
