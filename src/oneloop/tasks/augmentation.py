"""Packaged image data sets, and the image transforms: resize, augmentation, mixup and cutmix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from oneloop.tasks.rows.rows import Mapped

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}


class _InMemory:
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def _stratified(images: Tensor, labels: Tensor, shares: tuple[float, ...]) -> list[_InMemory]:
    """Return stratified splits with these ``shares``.

    Each class is shuffled with seed 0 and divided.
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    members = [shuffled[labels[shuffled] == label] for label in labels.unique()]
    splits = []
    for number in range(len(shares)):
        # Take the same part of each class.
        start, stop = sum(shares[:number]), sum(shares[: number + 1])
        parts = []
        for own in members:
            parts.append(own[round(start * len(own)) : round(stop * len(own))])
        chosen = torch.cat(parts)
        splits.append(_InMemory(images[chosen], labels[chosen]))
    return splits


def digits() -> tuple[dict[str, Any], list[str]]:
    """Return splits and class names of 1,797 handwritten digits (8x8).

    70 % are for training, 15 % for validation, and 15 % for test.
    """
    pixels, labels = _sklearn_digits()
    images = torch.from_numpy(pixels.astype(np.float32))[:, None] / 8 - 1
    splits = _stratified(images, torch.tensor(labels), (0.7, 0.15, 0.15))
    sets = dict(zip(("train", "validation", "test"), splits, strict=True))
    return sets, [*map(str, range(10))]


def _sklearn_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels (samples, 8, 8) and labels of load_digits.

    They are read from its file: importing scikit-learn takes seconds.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "task.data digits comes with scikit-learn, which is not installed", name="sklearn"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    pixels = table[:, :-1].reshape(-1, 8, 8)
    return pixels, table[:, -1].astype(np.int64)


def torchvision_set(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    """Return splits and class names of a data set of torchvision.

    Args:
        data: a key of :data:`TORCHVISION`.
        root: folder of the data sets.
        download: download the set if it is missing.

    Raises:
        ValueError: the set is missing.
    """
    from torchvision import datasets

    # Read both splits of torchvision. Its test split stays; validation is a share of the other.
    kind = getattr(datasets, TORCHVISION[data])
    try:
        trained = kind(root, train=True, download=download)
        test = kind(root, train=False, download=download)
    except RuntimeError as error:
        raise ValueError(
            f"task.data {data!r} is not under task.root {root!r}; copy it there, or set "
            "--task.download true"
        ) from error
    images, labels = _tensors(trained)
    train, validation = _stratified(images, labels, (0.9, 0.1))
    sets = {
        "train": train,
        "validation": validation,
        "test": _InMemory(*_tensors(test)),
    }
    return sets, list(trained.classes)


def _tensors(split: Any) -> tuple[Tensor, Tensor]:
    """Return the images (samples, channels, height, width) from -1 to 1, and the labels."""
    pixels = torch.as_tensor(split.data)
    if pixels.ndim == 3:
        pixels = pixels[:, None]  # grey
    else:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.as_tensor(split.targets)


_MAX_ALPHA = 100  # largest Beta parameter: 1 is uniform; at 100 nearly all shares are near 0.5


@dataclass(frozen=True)
class Augmentation:
    """Random augmentations of training images, in the order in which they are applied."""

    crop: float = 0.0  # minimum area share of the random resized crop (0: off)
    randaugment: int = 0  # magnitude of two RandAugment operations, 1 to 30 (0: off)
    shift: bool = False  # shift by up to an eighth of a side
    mirror: bool = False  # horizontal flip with probability 0.5
    erasing: float = 0.0  # probability of random erasing

    def __post_init__(self) -> None:
        for name, limit in (("crop", 1), ("randaugment", 30), ("erasing", 1)):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"task.{name} {getattr(self, name)} must be between 0 and {limit}")


def prepared(
    size: int | None, mean: Sequence[float], std: Sequence[float], how: Augmentation | None = None
) -> Callable[[Any], Tensor]:
    """Return a transform from a PIL image, or normalized pixels, to the model's input.

    Args:
        size: pixels a side of the input; None: unchanged.
        mean: mean of the pixels (0 to 1), by channel; with one channel, images become grey.
        std: standard deviation of the pixels, likewise.
        how: augmentations of training images; None: no augmentation.

    Raises:
        ValueError: ``mean`` and ``std`` do not both have 1 or 3 channels.
    """
    # Check the arguments once, before the first image.
    how = how or Augmentation()
    if len(mean) != len(std) or len(mean) not in (1, 3):
        raise ValueError(
            f"task.mean {list(mean)} and task.std {list(std)} must both have 3 channels, or both 1"
        )

    return partial(_made, size, tuple(mean), tuple(std), how)


def _made(
    size: int | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    how: Augmentation,
    image: Any,
) -> Tensor:
    """Return the model's input; see :func:`prepared`."""
    # Normalized pixels of the right size need no pipeline.
    is_ready = isinstance(image, Tensor) and size in (None, image.shape[-1])
    if how.crop or how.randaugment or not is_ready:
        pipeline = _pipeline(size, mean, std, how)
        image = pipeline(_as_bytes(image, mean, std))

    # Augment the pixels; a random crop already shifts.
    if how.shift and not how.crop:
        image = shifted(image, max(1, image.shape[-1] // 8))
    if how.mirror and torch.rand(()) < 0.5:
        image = image.flip(-1)
    if how.erasing:
        from torchvision.transforms import v2

        image = v2.RandomErasing(how.erasing)(image)
    return image  # type: ignore[no-any-return]


def _as_bytes(image: Any, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Undo the normalization of pixels (uint8); return other images unchanged."""
    if not isinstance(image, Tensor):
        return image
    scale = torch.tensor(std)[:, None, None]
    zero = torch.tensor(mean)[:, None, None]
    return ((image * scale + zero) * 255).round().clamp(0, 255).to(torch.uint8)


@cache
def _pipeline(
    size: int | None, mean: Sequence[float], std: Sequence[float], how: Augmentation
) -> Callable[[Any], Tensor]:
    """Return the transforms of torchvision: one object for each setting, in each process."""
    from torchvision.transforms import v2

    # Work on bytes first: RandAugment needs them.
    steps: list[Any] = []
    if size is not None and how.crop:
        steps.append(v2.RandomResizedCrop((size, size), scale=(how.crop, 1.0)))
    elif size is not None:
        steps.append(v2.Resize((size, size)))
    if len(mean) == 1:
        steps.append(v2.Grayscale())
    if how.randaugment:
        steps.append(v2.RandAugment(2, how.randaugment))

    # Normalize them.
    steps += [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean, std),
        v2.ToPureTensor(),
    ]
    return v2.Compose(steps)  # type: ignore[no-any-return]


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

    def __init__(self, rows: Any, make: Callable[[Any], Any], image: str) -> None:
        super().__init__(rows, make)
        self.image = image

    def file(self, index: int) -> str | None:
        """Return the path of the image; None if its bytes are in the row."""
        value = self.rows[index][self.image]
        return value.get("path") if isinstance(value, Mapping) else None


class Images(Mapped):
    """Images transformed by ``make`` (from :func:`prepared`), with their labels."""

    def __init__(self, part: Any, make: Callable[[Any], Tensor]) -> None:
        super().__init__(part, partial(_first_made, make))


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

    Raises:
        ValueError: a Beta parameter is out of range.
    """

    def __init__(self, images: Any, classes: int, *, mixup: float, cutmix: float) -> None:
        super().__init__(images, None)  # type: ignore[arg-type]
        self.classes = classes
        self.mixup = mixup
        self.cutmix = cutmix
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= alpha <= _MAX_ALPHA:
                raise ValueError(
                    f"task.{name} {alpha} must be between 0 and {_MAX_ALPHA}; common values "
                    "are 0.2 to 1"
                )

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
    top, bottom = max(0, down - rows // 2), min(height, down - rows // 2 + rows)
    left, end = max(0, right - columns // 2), min(width, right - columns // 2 + columns)
    image = image.clone()
    image[:, top:bottom, left:end] = other[:, top:bottom, left:end]
    return image, torch.tensor(1 - (bottom - top) * (end - left) / (height * width))


def _first_made(make: Callable[[Any], Tensor], sample: tuple[Any, Any]) -> tuple[Tensor, Any]:
    """Return a sample whose image, its first part, is transformed."""
    return make(sample[0]), sample[1]


def of_row(
    decode: Callable[[Any], tuple[Any, Any]], make: Callable[[Any], Tensor], row: Any
) -> tuple[Tensor, Any]:
    """Return the sample of a row: its decoded and transformed image, and its label."""
    return _first_made(make, decode(row))
