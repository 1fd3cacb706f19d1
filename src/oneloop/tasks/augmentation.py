"""The image transforms: resize, augmentation, mixup and cutmix; and repeated augmentation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from oneloop.data.order import EpochsAndIndices, Ordered, order_of
from oneloop.tasks.image_settings import PLAIN, ImageSettings, Resizing
from oneloop.tasks.rows.rows import Mapped


@dataclass
class Transform:
    """A transform from a PIL image, or normalized pixels, to the model's input.

    Args:
        resizing: how the image is resized.
        mean: mean of the pixels (0 to 1), by channel; with one channel, images become grey.
        std: standard deviation of the pixels, likewise.
        keys: the augmentations of training images; by default none.

    Raises:
        ValueError: ``mean`` and ``std`` do not both have 1 or 3 channels.
    """

    resizing: Resizing
    mean: Sequence[float]
    std: Sequence[float]
    keys: ImageSettings = PLAIN

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(
                f"task.mean {list(self.mean)} and task.std {list(self.std)} must both have 3 "
                "channels, or both 1"
            )

    def __call__(self, image: Any) -> Tensor:
        # Normalized pixels of the right size need no pipeline.
        keys = self.keys
        is_ready = isinstance(image, Tensor) and self.resizing.size == image.shape[-1]
        if keys.needs_bytes or self.resizing.center or not is_ready:
            image = self._pipeline(self._as_bytes(image))

        # Augment the pixels; a random crop already shifts.
        if keys.augment and not keys.crop:
            image = shifted(image, max(1, image.shape[-1] // 8))
        if keys.mirror and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if keys.erasing:
            from torchvision.transforms import v2

            image = v2.RandomErasing(keys.erasing)(image)
        return image  # type: ignore[no-any-return]

    def sample(self, sample: tuple[Any, Any]) -> tuple[Tensor, Any]:
        """Return a sample, an image and its label, with the transformed image."""
        image, label = sample
        return self(image), label

    def _as_bytes(self, image: Any) -> Any:
        """Undo the normalization of pixels (uint8); return other images unchanged."""
        if not isinstance(image, Tensor):
            return image
        scale = torch.tensor(self.std)[:, None, None]
        zero = torch.tensor(self.mean)[:, None, None]
        return ((image * scale + zero) * 255).round().clamp(0, 255).to(torch.uint8)

    @cached_property
    def _pipeline(self) -> Callable[[Any], Tensor]:
        """The transforms of torchvision."""
        from torchvision.transforms import InterpolationMode, v2

        # Work on bytes first: RandAugment needs them.
        steps: list[Any] = []
        size = self.resizing.size
        mode = InterpolationMode(self.resizing.interpolation)
        keys = self.keys
        if keys.crop:
            area = (keys.crop, keys.crop_max)
            steps.append(v2.RandomResizedCrop((size, size), area, keys.ratio, interpolation=mode))
        elif self.resizing.center:
            steps.append(v2.Resize(self.resizing.shorter_side, mode))
            is_down = self.resizing.rounds_down
            steps.append(partial(_middle, size) if is_down else v2.CenterCrop(size))
        else:
            steps.append(v2.Resize((size, size), mode))
        if len(self.mean) == 1:
            steps.append(v2.Grayscale())

        # Change shapes and colours.
        if keys.randaugment:
            steps.append(v2.RandAugment(2, keys.randaugment))
        if keys.trivialaugment:
            steps.append(v2.TrivialAugmentWide())
        if any(keys.jitter):
            steps.append(v2.ColorJitter(*keys.jitter))

        # Normalize them.
        steps += [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(self.mean, self.std),
            v2.ToPureTensor(),
        ]
        return v2.Compose(steps)  # type: ignore[no-any-return]


def _middle(size: int, image: Any) -> Any:
    """Return the middle of an image, a square; its position is rounded down."""
    from torchvision.transforms.v2 import functional

    height, width = functional.get_size(image)
    return functional.crop(image, (height - size) // 2, (width - size) // 2, size, size)


def shifted(image: Tensor, most: int) -> Tensor:
    """Shift the image randomly in each direction; the border is repeated.

    Args:
        image: (channels, height, width).
        most: maximum shift, in pixels.
    """
    down, right = torch.randint(0, 2 * most + 1, (2,)).tolist()
    padded = F.pad(image, (most, most, most, most), mode="replicate")
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


class Files(Mapped):
    """Images of rows that know the names of their files; ``image`` is their column."""

    def __init__(self, images: Mapped, make: Callable[[Any], Any], image: str) -> None:
        super().__init__(images, make)
        self.image = image

    def file(self, index: int) -> str | None:
        """Return the path of the image; None if its bytes are in the row."""
        value = self.rows.rows[index][self.image]
        return value.get("path") if isinstance(value, Mapping) else None


class Blended(Mapped):
    """Images mixed with another image of the set, by mixup or cutmix.

    The partner is drawn from the whole set, or from the same row group if the set is read in
    windows. The label becomes the share of each class, shape (classes,).

    Args:
        images: map-style data set of images and labels.
        classes: number of classes.
        mixup: Beta parameter of mixup (Zhang et al. 2018; 0: off).
        cutmix: Beta parameter of cutmix (Yun et al. 2019; 0: off). If both are above 0, each sample
            uses one of the two with probability 0.5.
    """

    def __init__(self, images: Any, classes: int, *, mixup: float, cutmix: float) -> None:
        super().__init__(images, None)  # type: ignore[arg-type]
        self.classes = classes
        self.mixup = mixup
        self.cutmix = cutmix

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Draw the method, its share of the first image, and the second image, in this order.
        cut = bool(self.cutmix) and (not self.mixup or bool(torch.rand(()) < 0.5))
        alpha = torch.tensor(self.cutmix if cut else self.mixup)
        share = torch.distributions.Beta(alpha, alpha).sample()
        candidates = self.near(index)
        partner = candidates[int(torch.randint(len(candidates), ()))]
        image, label = self.rows[index]
        image_2, label_2 = self.rows[partner]

        # Mix the images. A rectangle at the border is smaller, and the share larger.
        if cut:
            image, share = _paste(image, image_2, share)
        else:
            image = image * share + image_2 * (1 - share)
        return image, self._soft(label) * share + self._soft(label_2) * (1 - share)

    def _soft(self, label: Any) -> Tensor:
        """Return the share of each class, shape (classes,)."""
        if isinstance(label, Tensor):
            return label
        return F.one_hot(torch.tensor(label), self.classes).float()


def _paste(image: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of ``other`` with area 1 - share, clipped at the border.

    Return the image, and its share.
    """
    height, width = image.shape[-2:]
    side = (1 - share).sqrt()
    rows, columns = int(height * side), int(width * side)

    # Draw the middle of the rectangle, and clip its sides.
    down = int(torch.randint(height, ()))
    right = int(torch.randint(width, ()))
    top = max(0, down - rows // 2)
    bottom = min(height, down - rows // 2 + rows)
    left = max(0, right - columns // 2)
    end = min(width, right - columns // 2 + columns)
    image = image.clone()
    image[:, top:bottom, left:end] = other[:, top:bottom, left:end]
    return image, torch.tensor(1 - (bottom - top) * (end - left) / (height * width))


class Repeated(Mapped):
    """Images that occur several times in a step: repeated augmentation (Hoffer et al. 2020).

    Every copy has its own random numbers, and so its own augmentations and partner of mixup.

    Args:
        images: map-style data set.
        copies: copies of each image in a step.
    """

    def __init__(self, images: Any, copies: int) -> None:
        super().__init__(images, None)  # type: ignore[arg-type]
        self.copies = copies

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return the order of the images, each ``copies`` times in a step.

        Raises:
            ValueError: the samples of a step cannot be divided into so many copies.
        """
        if batch % self.copies:
            raise ValueError(
                f"batch.size {batch} must be a multiple of task.repeats {self.copies}, because "
                "each image of a step occurs so often in it"
            )
        images = order_of(self.rows, seed=seed, batch=batch // self.copies, shuffle=shuffle)
        return RepeatedOrder(images, self.copies, batch=batch)


@dataclass
class RepeatedOrder(Ordered):
    """An order in which each sample of a step occurs several times in it.

    Step ``k`` has the samples of step ``k`` of ``samples``, whose steps are shorter: first one copy
    of each, then the next copy of each. The epoch of copy ``c`` in epoch ``e`` is
    ``e * copies + c``, so that each copy has its own random numbers
    (:class:`oneloop.data.seeded_samples.SeededSamples`).

    >>> order = RepeatedOrder(Order(1797, seed=0), 3, batch=96)  # 32 samples, three times each

    Args:
        samples: the order without copies.
        copies: copies of each sample in a step.
        batch: samples of a step, copies included; a multiple of ``copies``.
    """

    samples: Ordered
    copies: int
    batch: int

    def at(self, positions: NDArray[np.int64]) -> EpochsAndIndices:
        """Return epochs and sample indices, each in the shape of ``positions``."""
        each = self.batch // self.copies
        steps, offsets = np.divmod(positions, self.batch)
        copies, within = np.divmod(offsets, each)
        epochs, indices = self.samples.at(steps * each + within)
        return epochs * self.copies + copies, indices
