"""Packaged image sets, and images as a model reads them: resized, augmented, mixed."""

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

TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


class _InMemory:
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def _divided(images: Tensor, labels: Tensor, shares: tuple[float, ...]) -> list[_InMemory]:
    """Parts with the same mix of classes, by a fixed rule: every class is dealt out in a fixed random order."""
    parts: list[list[Tensor]] = [[] for _ in shares]
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for label in labels.unique():
        members = shuffled[labels[shuffled] == label]
        bounds = [round(sum(shares[:i]) * len(members)) for i in range(len(shares) + 1)]
        for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
            part.append(members[start:stop])
    return [_InMemory(images[chosen], labels[chosen]) for chosen in (torch.cat(part) for part in parts)]


def digits() -> tuple[dict[str, Any], list[str]]:
    """1,797 handwritten digits of 8x8 pixels: 70 % to train, 15 % validation, 15 % test."""
    pixels, labels = _sklearn_digits()
    images = torch.tensor(pixels, dtype=torch.float32)[:, None] / 8 - 1
    parts = _divided(images, torch.tensor(labels), (0.7, 0.15, 0.15))
    return dict(zip(("train", "validation", "test"), parts, strict=True)), [str(digit) for digit in range(10)]


def _sklearn_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (samples, 8, 8) and labels of scikit-learn's load_digits, from its file: importing it takes seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ImportError("task.data digits comes with scikit-learn, which is not installed; pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def torchvision_set(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[data])
    try:
        sets = [kind(root, train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        advice = "copy it there, or set --task.download true"
        raise ValueError(f"task.data {data!r} is not under task.root {root!r}; {advice}") from error
    pixels = [torch.as_tensor(part.data) for part in sets]
    pixels = [(x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)).float() / 127.5 - 1 for x in pixels]
    labels = [torch.as_tensor(part.targets) for part in sets]
    train, validation = _divided(pixels[0], labels[0], (0.9, 0.1))
    return {"train": train, "validation": validation, "test": _InMemory(pixels[1], labels[1])}, list(sets[0].classes)


_MOST = 100  # parameter of a Beta distribution: 1 is uniform, and so large a one next to always a half


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images at random, in this order."""

    crop: float = 0.0  # least share of the image that is cut out and brought to size (0: all of it)
    randaugment: int = 0  # magnitude of two operations of RandAugment, 1 to 30 (0: none)
    shift: bool = False  # moved by up to an eighth of a side
    mirror: bool = False  # left and right swapped, half the time
    erasing: float = 0.0  # how often a rectangle is overwritten

    def __post_init__(self) -> None:
        for name, most in (("crop", 1), ("randaugment", 30), ("erasing", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"task.{name} {getattr(self, name)} must be between 0 and {most}")

    @property
    def of_pixels(self) -> bool:
        """Whether it needs the pixels as they are stored."""
        return bool(self.crop or self.randaugment)


def prepared(
    size: int | None, mean: Sequence[float], std: Sequence[float], how: Augmentation | None = None
) -> Callable[[Any], Tensor]:
    """Return what turns a PIL image, or centred pixels, into the model's input of ``size`` pixels a side (None:
    unchanged). One channel of ``mean`` makes it grey; ``how`` augments training images."""
    how = how or Augmentation()
    if len(mean) != len(std) or len(mean) not in (1, 3):
        raise ValueError(f"task.mean {list(mean)} and task.std {list(std)} are not of 3 channels each, or of one")

    def make(image: Any) -> Tensor:
        if not isinstance(image, Tensor) or how.of_pixels or size not in (None, image.shape[-1]):
            image = _pixels(size, tuple(mean), tuple(std), how)(_as_bytes(image, mean, std))
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
    """Pixels that are around 0 as those they were made of."""
    if not isinstance(image, Tensor):
        return image
    scale, zero = (torch.tensor(values)[:, None, None] for values in (std, mean))
    return ((image * scale + zero) * 255).round().clamp(0, 255).to(torch.uint8)


_made: dict[Any, Callable[[Any], Tensor]] = {}  # kept: a pipeline is made once in each process


def _pixels(
    size: int | None, mean: Sequence[float], std: Sequence[float], how: Augmentation
) -> Callable[[Any], Tensor]:
    if made := _made.get((size, mean, std, how)):
        return made
    from torchvision.transforms import v2

    steps: list[Any] = []
    if size is not None:
        side = (size, size)
        steps += [v2.RandomResizedCrop(side, scale=(how.crop, 1.0)) if how.crop else v2.Resize(side)]
    steps += [v2.Grayscale()] if len(mean) == 1 else []
    steps += [v2.RandAugment(2, how.randaugment)] if how.randaugment else []
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std), v2.ToPureTensor()]
    return _made.setdefault((size, mean, std, how), v2.Compose(steps))


def shifted(image: Tensor, most: int) -> Tensor:
    """The image moved by up to ``most`` pixels each way, at random; the border is repeated."""
    down, right = torch.randint(0, 2 * most + 1, (2,)).tolist()
    padded = F.pad(image, (most, most, most, most), mode="replicate")
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


class Images(Mapped):
    """Images prepared by ``make`` (of :func:`prepared`), with their labels."""

    def __init__(self, part: Any, make: Callable[[Any], Tensor]) -> None:
        super().__init__(part, lambda sample: (make(sample[0]), sample[1]))


class Blended(Mapped):
    """Each image mixed with another one of the set: mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019), by Beta
    distributions with these parameters (0: off; both: one of them for each sample, at even odds).

    The partner is drawn from the whole set, or from the same row group if it is read in windows. The label becomes the
    shares of the classes, shape (classes,).
    """

    def __init__(self, images: Any, classes: int, *, mixup: float, cutmix: float) -> None:
        super().__init__(images, None)  # type: ignore[arg-type]
        self.classes, self.mixup, self.cutmix = classes, mixup, cutmix
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= alpha <= _MOST:
                raise ValueError(f"task.{name} {alpha} must be between 0 and {_MOST}; common values are 0.2 to 1")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        cut = bool(self.cutmix) and (not self.mixup or bool(torch.rand(()) < 0.5))
        alpha = torch.tensor(self.cutmix if cut else self.mixup)
        share = torch.distributions.Beta(alpha, alpha).sample()
        among = self.near(index)
        other = among[int(torch.randint(len(among), ()))]
        (image, label), (image_2, label_2) = self.rows[index], self.rows[other]
        if cut:
            image, share = _pasted(image, image_2, share)
        else:
            image = image * share + image_2 * (1 - share)
        return image, self._soft(label) * share + self._soft(label_2) * (1 - share)

    def _soft(self, label: Any) -> Tensor:
        return label if isinstance(label, Tensor) else F.one_hot(torch.tensor(label), self.classes).float()


def _pasted(image: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """A rectangle of ``other`` in the image, of 1 - share of its area but for what lies outside; and the share that is
    left."""
    height, width = image.shape[-2:]
    side = (1 - share).sqrt()
    rows, columns = int(height * side), int(width * side)
    down, right = int(torch.randint(height, ())), int(torch.randint(width, ()))
    top, bottom = max(0, down - rows // 2), min(height, down - rows // 2 + rows)
    left, end = max(0, right - columns // 2), min(width, right - columns // 2 + columns)
    image = image.clone()
    image[:, top:bottom, left:end] = other[:, top:bottom, left:end]
    return image, torch.tensor(1 - (bottom - top) * (end - left) / (height * width))
