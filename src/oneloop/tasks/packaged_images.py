"""Packaged image data sets: digits of scikit-learn, and sets of torchvision.

The digits are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C.
Kaynak, from the UCI Machine Learning Repository, under the license CC BY 4.0.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oneloop.tasks.packaged_rows import FOLDER, SPLITS

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
PACKAGED = ("digits", *TORCHVISION)
"""names of the packaged data sets"""
NEEDS = {
    **dict.fromkeys(
        ("image_size", "held_out", "split_by", "stream", "mean", "std"),
        f"data!={'|'.join(PACKAGED)}",
    ),
    **dict.fromkeys(("root", "download"), f"data={'|'.join(TORCHVISION)}"),
    **dict.fromkeys(("crop_max", "crop_ratio"), "crop!=0"),
    **dict.fromkeys(("width", "dropout"), "model=cnn"),
    "trust_remote_code": "model!=cnn",
}
"""``needs`` of image classification; see :class:`oneloop.task_protocol.protocol.Task`"""


@dataclass
class _InMemory:
    images: Tensor
    labels: list[int]

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
    start = 0.0
    for share in shares:
        # Take the same part of each class.
        stop = start + share
        parts = [own[round(start * len(own)) : round(stop * len(own))] for own in members]
        chosen = torch.cat(parts)
        splits.append(_InMemory(images[chosen], labels[chosen].tolist()))
        start = stop
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
        # 1,797 handwritten digits of 8x8 pixels from 0 to 16
        with np.load(FOLDER / "digits.npz") as arrays:
            images = torch.from_numpy(arrays["images"])[:, None].float() / 8 - 1
            labels = torch.from_numpy(arrays["labels"])
        splits = _stratified(images, labels, (0.7, 0.15, 0.15))
        classes = [*map(str, range(10))]
    else:
        # The test split of torchvision stays; validation is a share of the other.
        trained, tested = _torchvision_splits(data, root, download)
        splits = _stratified(*_tensors(trained), (0.9, 0.1))
        images, labels = _tensors(tested)
        splits.append(_InMemory(images, labels.tolist()))
        classes = list(trained.classes)
    return dict(zip(SPLITS, splits, strict=True)), classes


def _torchvision_splits(data: str, root: str, download: bool) -> list[Any]:
    """Return the training and the test split of a data set of torchvision."""
    from torchvision import datasets

    kind = getattr(datasets, TORCHVISION[data])
    try:
        return [kind(root, train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        raise ValueError(
            f"task.data {data!r} is not under task.root {root!r}; copy it there, or set "
            "--task.download true"
        ) from error


def _tensors(split: Any) -> tuple[Tensor, Tensor]:
    """Return the images (samples, channels, height, width) from -1 to 1, and the labels."""
    pixels = torch.as_tensor(split.data)
    if pixels.ndim == 3:
        pixels = pixels[:, None]  # grey
    else:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.as_tensor(split.targets)
