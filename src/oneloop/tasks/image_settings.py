"""The settings of image transforms: how images are resized, cropped, changed and repeated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Interpolation = Literal["nearest", "bilinear", "bicubic"]
"""how the pixels of a resized image are interpolated"""


@dataclass(frozen=True)
class Resizing:
    """How an image is resized to a square.

    Args:
        size: pixels a side; None: the image stays.
        interpolation: how its pixels are interpolated.
        center: resize the shorter side to ``size / center`` pixels, and crop the middle, as timm
            does with its ``crop_pct``; 0: resize both sides to ``size``.
        rounds_down: the position of the middle is rounded down, as in transformers; torchvision and
            timm round half a pixel to an even number.

    Raises:
        ValueError: ``center`` is neither 0 nor between 0.1 and 1.
    """

    size: int | None = None
    interpolation: Interpolation = "bilinear"
    center: float = 0.0
    rounds_down: bool = False

    def __post_init__(self) -> None:
        if self.center and not 0.1 <= self.center <= 1:
            raise ValueError(
                f"task.test_crop {self.center} must be between 0.1 and 1; 0.875 is common, and 0 "
                "resizes the whole image to a square"
            )

    def shorter_side(self, size: int) -> int:
        """Return the shorter side of the resized image, of which the middle is cropped, in pixels.

        Args:
            size: side of the crop, in pixels.
        """
        return math.floor(size / self.center)


def check_effect(trained: Resizing, tested: Resizing, *, crop: bool, same: bool) -> None:
    """Check that the interpolation of images in memory has an effect.

    Args:
        trained: that of training images.
        tested: that of evaluation images.
        crop: training images are cropped, and so resized.
        same: the side of evaluation images stays.

    Raises:
        ValueError: it has none.
    """
    is_tested = bool(tested.center) or not same
    differ = tested.interpolation != trained.interpolation
    key = ""
    if differ and not is_tested:
        key = f"task.test_interpolation {tested.interpolation}"
    elif trained.interpolation != "bilinear" and not crop and (differ or not is_tested):
        key = f"task.interpolation {trained.interpolation}"
    if key:
        raise ValueError(
            f"{key} has no effect, because these images of a packaged data set are not resized; "
            "remove it, or set task.crop or task.test_size"
        )


@dataclass(frozen=True)
class RandomCrop:
    """The random resized crop: a part of the image is resized.

    Raises:
        ValueError: a value is out of range.
    """

    smallest: float = 0.0  # share of the image's area (0: no crop)
    largest: float = 1.0  # likewise
    ratio: Sequence[float] | None = None  # smallest and largest width / height; None: 3/4 and 4/3

    def __post_init__(self) -> None:
        if not 0 <= self.smallest <= 1:
            raise ValueError(f"task.crop {self.smallest} must be between 0 and 1")
        if not self.smallest <= self.largest <= 1 or not self.largest:
            raise ValueError(
                f"task.crop_max {self.largest} must be above 0, at least task.crop "
                f"{self.smallest}, and at most 1"
            )
        ratio = (3 / 4, 4 / 3) if self.ratio is None else tuple(self.ratio)
        if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < math.inf:
            raise ValueError(
                f"task.crop_ratio {list(ratio)} must be the smallest and the largest width / "
                "height, both above 0; [0.75, 1.3333] is common"
            )
        object.__setattr__(self, "ratio", ratio)  # a list cannot be hashed


@dataclass(frozen=True)
class Augmentation:
    """Random augmentations of training images, in the order in which they are applied.

    Raises:
        ValueError: a value is out of range, or two of them exclude each other.
    """

    crop: RandomCrop = RandomCrop()
    randaugment: int = 0  # magnitude of two RandAugment operations, 1 to 30 (0: off)
    trivialaugment: bool = False  # one operation of TrivialAugment (Mueller & Hutter 2021)
    jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # as :func:`jitter_strengths` returns it
    shift: bool = False  # shift by up to an eighth of a side
    mirror: bool = False  # horizontal flip with probability 0.5
    erasing: float = 0.0  # probability of random erasing

    def __post_init__(self) -> None:
        for name, limit in (("randaugment", 30), ("erasing", 1)):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"task.{name} {getattr(self, name)} must be between 0 and {limit}")
        if self.randaugment and self.trivialaugment:
            raise ValueError(
                f"task.randaugment {self.randaugment} and task.trivialaugment true exclude each "
                "other; remove one of them"
            )

    @property
    def needs_bytes(self) -> bool:
        """Return whether an augmentation works on bytes, before they are normalized."""
        first = self.crop.smallest or self.randaugment or self.trivialaugment
        return bool(first or any(self.jitter))


def jitter_strengths(setting: float | Sequence[float]) -> tuple[float, ...]:
    """Return the strengths of brightness, contrast, saturation and hue, for ColorJitter.

    Args:
        setting: one strength for the first three, as in timm; or three or four strengths.

    Raises:
        ValueError: there are too few or too many, or one is out of range.
    """
    strengths: tuple[float, ...]
    if isinstance(setting, int | float):
        strengths = (setting, setting, setting, 0.0)
    elif len(setting) == 3:
        strengths = (*setting, 0.0)
    else:
        strengths = tuple(setting)
    if len(strengths) != 4 or not all(0 <= one < math.inf for one in strengths):
        raise ValueError(
            f"task.color_jitter {setting} must be one number from 0, or [brightness, contrast, "
            "saturation] or [brightness, contrast, saturation, hue]"
        )
    if strengths[3] > 0.5:
        raise ValueError(
            f"task.color_jitter {setting}: the strength of hue must be between 0 and 0.5"
        )
    return strengths


def check_repeats(repeats: int, *, is_random: bool) -> None:
    """Check the number of copies of each image in a step.

    Args:
        repeats: the number.
        is_random: some augmentation is on.

    Raises:
        ValueError: the number is below 1, or the copies would be equal.
    """
    if repeats < 1:
        raise ValueError(f"task.repeats {repeats} must be 1 or more; 3 is common")
    if repeats > 1 and not is_random:
        raise ValueError(
            f"task.repeats {repeats} would repeat equal images, because no augmentation is on; "
            "set one (task.crop 0.08), or remove task.repeats"
        )
