"""Images that need no files of one's own: scikit-learn's digits, and torchvision's MNIST and CIFAR."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        raise ValueError(
            f"task.data {data!r} is not under task.root {root!r}; put it there, or let torchvision fetch"
            " it with --task.download true"
        ) from error
    pixels = [torch.as_tensor(part.data) for part in sets]
    pixels = [(x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)).float() / 127.5 - 1 for x in pixels]
    labels = [torch.as_tensor(part.targets) for part in sets]
    train, validation = _divided(pixels[0], labels[0], (0.9, 0.1))
    return {"train": train, "validation": validation, "test": _InMemory(pixels[1], labels[1])}, list(sets[0].classes)
