"""Packaged image data sets: digits of scikit-learn, and sets of torchvision."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
PACKAGED = ("digits", *TORCHVISION)
"""names of the packaged data sets"""
_OWN_IMAGES = f"data!={'|'.join(PACKAGED)}"
_DOWNLOADED = f"data={'|'.join(TORCHVISION)}"
NEEDS = {
    "image_size": _OWN_IMAGES,
    "held_out": _OWN_IMAGES,
    "split_by": _OWN_IMAGES,
    "stream": _OWN_IMAGES,
    "crop_max": "crop!=0",
    "crop_ratio": "crop!=0",
    "mean": _OWN_IMAGES,
    "std": _OWN_IMAGES,
    "width": "model=cnn",
    "dropout": "model=cnn",
    "trust_remote_code": "model!=cnn",
    "root": _DOWNLOADED,
    "download": _DOWNLOADED,
}
"""``needs`` of image classification; see :class:`oneloop.task_protocol.protocol.Task`"""


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


def packaged(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    """Return splits and class names of a packaged data set.

    Args:
        data: digits, or a key of :data:`TORCHVISION`.
        root: folder of the data sets of torchvision.
        download: download the set if it is missing.

    Raises:
        ValueError: the set is missing.
    """
    if data == "digits":
        return _digits()
    return _torchvision_set(data, root, download)


def _digits() -> tuple[dict[str, Any], list[str]]:
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


def _torchvision_set(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    """Return splits and class names of a data set of torchvision; see :func:`packaged`."""
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
