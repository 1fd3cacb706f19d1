"""Packaged image data sets, and the image transforms: resize, augmentation, mixup and cutmix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from oneloop.data.rows.rows import Mapped

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}


class _InMemory:
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def _stratified(images: Tensor, labels: Tensor, shares: tuple[float, ...]) -> list[_InMemory]:
    """Return stratified splits with these ``shares``: each class is shuffled with seed 0 and
    divided."""
    splits: list[list[Tensor]] = [[] for _ in shares]
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        bounds = [round(sum(shares[:i]) * len(members)) for i in range(len(shares) + 1)]
        for split, start, stop in zip(splits, bounds, bounds[1:], strict=False):
            split.append(members[start:stop])
    return [
        _InMemory(images[chosen], labels[chosen])
        for chosen in (torch.cat(split) for split in splits)
    ]


def digits() -> tuple[dict[str, Any], list[str]]:
    """Return splits and class names of 1,797 handwritten digits (8x8): 70 % train, 15 % validation,
    15 % test."""
    pixels, labels = _sklearn_digits()
    images = torch.tensor(pixels, dtype=torch.float32)[:, None] / 8 - 1
    splits = _stratified(images, torch.tensor(labels), (0.7, 0.15, 0.15))
    return dict(zip(("train", "validation", "test"), splits, strict=True)), [
        str(digit) for digit in range(10)
    ]


def _sklearn_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels (samples, 8, 8) and labels of load_digits, from its file: importing
    scikit-learn takes seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ImportError(
            "task.data digits comes with scikit-learn, which is not installed; pip install "
            "scikit-learn"
        )
    table = np.loadtxt(
        Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
    )
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def torchvision_set(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[data])
    try:
        sets = [kind(root, train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        advice = "copy it there, or set --task.download true"
        raise ValueError(f"task.data {data!r} is not under task.root {root!r}; {advice}") from error
    pixels = [torch.as_tensor(split.data) for split in sets]
    pixels = [
        (x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)).float() / 127.5 - 1 for x in pixels
    ]
    labels = [torch.as_tensor(split.targets) for split in sets]
    train, validation = _stratified(pixels[0], labels[0], (0.9, 0.1))
    return {
        "train": train,
        "validation": validation,
        "test": _InMemory(pixels[1], labels[1]),
    }, list(sets[0].classes)


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
    """Return a transform from a PIL image, or normalized pixels, to the model's input of ``size``
    pixels a side (None: unchanged). With one channel in ``mean``, images become grey; ``how``
    augments training images."""
    how = how or Augmentation()
    if len(mean) != len(std) or len(mean) not in (1, 3):
        raise ValueError(
            f"task.mean {list(mean)} and task.std {list(std)} must both have 3 channels, or both 1"
        )

    def make(image: Any) -> Tensor:
        if (
            not isinstance(image, Tensor)
            or how.crop
            or how.randaugment
            or size not in (None, image.shape[-1])
        ):
            image = _pipeline(size, tuple(mean), tuple(std), how)(_as_bytes(image, mean, std))
        if how.shift and not how.crop:
            image = shifted(image, max(1, image.shape[-1] // 8))
        if how.mirror and torch.rand(()) < 0.5:
            image = image.flip(-1)
        if how.erasing:
            from torchvision.transforms import v2

            image = v2.RandomErasing(how.erasing)(image)
        return image  # type: ignore[no-any-return]

    return make


def _as_bytes(image: Any, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Undo the normalization of pixels (uint8); return other images unchanged."""
    if not isinstance(image, Tensor):
        return image
    scale, zero = (torch.tensor(values)[:, None, None] for values in (std, mean))
    return ((image * scale + zero) * 255).round().clamp(0, 255).to(torch.uint8)


_pipelines: dict[Any, Callable[[Any], Tensor]] = {}  # cache: one pipeline per setting and process


def _pipeline(
    size: int | None, mean: Sequence[float], std: Sequence[float], how: Augmentation
) -> Callable[[Any], Tensor]:
    if pipeline := _pipelines.get((size, mean, std, how)):
        return pipeline
    from torchvision.transforms import v2

    steps: list[Any] = []
    if size is not None:
        side = (size, size)
        steps += [
            v2.RandomResizedCrop(side, scale=(how.crop, 1.0)) if how.crop else v2.Resize(side)
        ]
    steps += [v2.Grayscale()] if len(mean) == 1 else []
    steps += [v2.RandAugment(2, how.randaugment)] if how.randaugment else []
    steps += [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean, std),
        v2.ToPureTensor(),
    ]
    return _pipelines.setdefault((size, mean, std, how), v2.Compose(steps))


def shifted(image: Tensor, most: int) -> Tensor:
    """Shift the image randomly by up to ``most`` pixels in each direction; the border is
    repeated."""
    down, right = torch.randint(0, 2 * most + 1, (2,)).tolist()
    padded = F.pad(image, (most, most, most, most), mode="replicate")
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


class Images(Mapped):
    """Images transformed by ``make`` (from :func:`prepared`), with their labels."""

    def __init__(self, part: Any, make: Callable[[Any], Tensor]) -> None:
        super().__init__(part, lambda sample: (make(sample[0]), sample[1]))


class Blended(Mapped):
    """Images mixed with another image of the set by mixup (Zhang et al. 2018) or cutmix (Yun et al.
    2019), with these Beta parameters (0: off; both above 0: each sample uses one of the two with
    probability 0.5).

    The partner is drawn from the whole set, or from the same row group if the set is read in
    windows. The label becomes the share of each class, shape (classes,)."""

    def __init__(self, images: Any, classes: int, *, mixup: float, cutmix: float) -> None:
        super().__init__(images, None)  # type: ignore[arg-type]
        self.classes, self.mixup, self.cutmix = classes, mixup, cutmix
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= alpha <= _MAX_ALPHA:
                raise ValueError(
                    f"task.{name} {alpha} must be between 0 and {_MAX_ALPHA}; common values "
                    "are 0.2 to 1"
                )

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        cut = bool(self.cutmix) and (not self.mixup or bool(torch.rand(()) < 0.5))
        alpha = torch.tensor(self.cutmix if cut else self.mixup)
        share = torch.distributions.Beta(alpha, alpha).sample()
        candidates = self.near(index)
        partner = candidates[int(torch.randint(len(candidates), ()))]
        (image, label), (image_2, label_2) = self.rows[index], self.rows[partner]
        if cut:
            image, share = _paste(image, image_2, share)
        else:
            image = image * share + image_2 * (1 - share)
        return image, self._soft(label) * share + self._soft(label_2) * (1 - share)

    def _soft(self, label: Any) -> Tensor:
        return (
            label
            if isinstance(label, Tensor)
            else F.one_hot(torch.tensor(label), self.classes).float()
        )


def _paste(image: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of ``other`` with area 1 - share, clipped at the border. Return the image
    and its share."""
    height, width = image.shape[-2:]
    side = (1 - share).sqrt()
    rows, columns = int(height * side), int(width * side)
    down, right = int(torch.randint(height, ())), int(torch.randint(width, ()))
    top, bottom = max(0, down - rows // 2), min(height, down - rows // 2 + rows)
    left, end = max(0, right - columns // 2), min(width, right - columns // 2 + columns)
    image = image.clone()
    image[:, top:bottom, left:end] = other[:, top:bottom, left:end]
    return image, torch.tensor(1 - (bottom - top) * (end - left) / (height * width))
