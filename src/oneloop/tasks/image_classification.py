"""Image classification: scikit-learn's digits, MNIST, CIFAR, or a folder of images; a small CNN or torchvision's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.data.rows.rows import Mapped, Row
from oneloop.data.rows.sources import Source, named_sources, notes_of, opened, sets_of, whole
from oneloop.tasks.base import Task
from oneloop.tasks.columns import columns_of, decoded, is_image, refused
from oneloop.tasks.image_models import Pretrained, image_model, is_transformers, statistics
from oneloop.tasks.labels import classes_of, likeliest, numbers_of
from oneloop.tasks.metrics import ClassCounts

_Augment = Literal["none", "shifted", "mirrored"]
_TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


class ImageClassification(Task):
    """Images into classes.

    Args:
        data: digits (8x8, packaged with scikit-learn), mnist, fashion_mnist, cifar10, cifar100; a folder with
            train/CLASS/*.png and validation/CLASS/*.png (test/ too), or CLASS/*.png; a file or folder of parquet or
            arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …].
        model: cnn; one of torchvision's by name; timm:NAME; a folder that transformers saved, or hf:ID[@REVISION]; or
            module.Class, called with num_classes.
        pretrained: a .safetensors file, or a folder with one; true: the weights that belong to the model's name (of a
            folder or hf: they are taken unless this is false). Where they are of other classes the last layer is new.
        width: channels of the CNN's first layer.
        augment: shift (and, but for digits and letters, mirror) the training images at random.
        image_size: pixels of a side that own images are resized to.
        mean: of the pixels (0 to 1), by channel, subtracted from own images (null: what the model says, else 0.5).
        std: that they are divided by (null: the same).
        image: column of the image.
        label: column of the class.
        held_out: share of the rows for validation, and as much for test, where the data has no such parts.
        window: megabytes of parquet rows that a process may hold; samples are shuffled among so many.
        root: folder of the downloaded sets.
        download: fetch a missing set from its public host.
        smoothing: label smoothing.
        dropout: of the CNN, before its last layer.
    """

    sample_weight = 1.0

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "digits",
        model: str = "cnn",
        pretrained: Pretrained = None,
        width: int = 32,
        augment: bool = True,
        image_size: int = 64,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        image: str = "image",
        label: str = "label",
        held_out: float = 0.05,
        window: int = 256,
        root: str = "data",
        download: bool = False,
        smoothing: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        self.architecture, self.pretrained = model, pretrained
        self.width = width
        self.smoothing = smoothing
        self.dropout = dropout
        self.notes: list[str] = []
        self.columns, self.window = {"image": image, "label": label}, window
        mirror = data not in ("digits", "mnist", "fashion_mnist")
        if data == "digits":
            parts, self.classes = _digits()
        elif isinstance(data, str) and data in _TORCHVISION:
            parts, self.classes = _torchvision(data, root, download)
        else:
            own = statistics(model)
            self._pixels = _prepared(image_size, mean or own[0], std or own[1])
            sources = [opened(one, held_out=held_out, window=window) for one in named_sources(data, self.columns)]
            parts, self.classes, self.notes = self._rows(sources)
        self._of_data = list(self.notes)
        how: _Augment = "none" if not augment else "mirrored" if mirror else "shifted"
        self._train = Images(parts.pop("train"), augment=how)
        self._evals = {name: Images(part) for name, part in parts.items()}
        self.shape = tuple(self._train[0][0].shape)
        if not hasattr(self, "_pixels"):
            self._pixels = _prepared(self.shape[-1], [0.5] * self.shape[0], [0.5] * self.shape[0])

    def model(self) -> nn.Module:
        if self.architecture == "cnn":
            return CNN(self.shape[0], len(self.classes), width=self.width, dropout=self.dropout)
        model, notes = image_model(self.architecture, self.classes, pretrained=self.pretrained)
        self.notes = [*self._of_data, *notes]
        return model

    def train_set(self) -> Images:
        return self._train

    def eval_sets(self) -> dict[str, Any]:
        return dict(self._evals)

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        source = whole(Source(data, self.columns | ({} if labelled else {"label": ""})), window=self.window)
        _check_images([source])
        number = numbers_of(source, "label", self.classes) if labelled else int
        return Files(source.parts["all"], self._sample(source, number), source.columns["image"])

    def _rows(self, sources: Sequence[Source]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Data sets by part, their classes, and what a person should know of them."""
        _check_images(sources)
        classes, numbers = classes_of(sources, "label")
        return sets_of(sources, lambda one: self._sample(one, numbers[one.name])), classes, notes_of(sources)

    def _sample(self, source: Source, number: Callable[[Any], int]) -> Callable[[Row], tuple[Tensor, int]]:
        image, label, pixels = source.columns["image"], source.columns["label"], self._pixels
        return lambda row: (pixels(decoded(row[image])), number(row.get(label, 0)))

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"image": torch.stack(images), "label": torch.tensor(labels)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["image"])
        logits = getattr(logits, "logits", logits)  # transformers returns more
        each = F.cross_entropy(logits, batch["label"], reduction="none", label_smoothing=self.smoothing)
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Of a model of transformers the files that make ``from_pretrained`` load the folder."""
        if is_transformers(self.architecture):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes))

    def update(self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["logits"], batch["label"])

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        return likeliest(outputs["logits"], self.classes)

    def show(self, sample: tuple[Tensor, int], outputs: dict[str, Tensor]) -> dict[str, Any]:
        image, label = sample
        confidence, found = outputs["logits"].float().softmax(-1).max(-1)
        return {
            "image": image,
            "target": self.classes[label],
            "prediction": self.classes[int(found)],
            "right": int(found) == label,
            "confidence": float(confidence),
        }


class Images(Mapped):
    """Images (float, channels x height x width, about -1 to 1) with labels, from pixels in memory or on disk."""

    def __init__(self, part: Any, *, augment: _Augment = "none") -> None:
        super().__init__(part, self._augmented)
        self.part = part
        self.augment = augment

    def _augmented(self, sample: tuple[Tensor, int]) -> tuple[Tensor, int]:
        image, label = sample
        if self.augment != "none":
            image = shifted(image, max(1, image.shape[-1] // 8))
        if self.augment == "mirrored" and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, label


def shifted(image: Tensor, most: int) -> Tensor:
    """The image moved by up to ``most`` pixels each way, at random; the border is repeated."""
    down, right = torch.randint(0, 2 * most + 1, (2,)).tolist()
    padded = F.pad(image, (most, most, most, most), mode="replicate")
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


class CNN(nn.Module):
    """Three convolutions with GroupNorm; no dropout unless asked, no batch statistics.

    It averages where others take a maximum: a near-tie under a maximum sends the gradient one way or the other by
    rounding alone, and two splits of a batch would then part by 1e-3 within 40 float32 steps instead of 1e-7.
    """

    def __init__(self, channels: int, classes: int, *, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.GroupNorm(8, outside), nn.GELU()]
            layers += [nn.AvgPool2d(2)] if inside != channels else []
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(16 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]


# --- where the pixels come from -------------------------------------------------------------------------------------


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


def _digits() -> tuple[dict[str, Any], list[str]]:
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


def _torchvision(data: str, root: str, download: bool) -> tuple[dict[str, Any], list[str]]:
    from torchvision import datasets

    kind = getattr(datasets, _TORCHVISION[data])
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


# --- people's own -----------------------------------------------------------------------------------------------------


class Files(Mapped):
    """Images of rows, which can say what their files are called."""

    def __init__(self, rows: Any, make: Callable[[Any], Any], image: str) -> None:
        super().__init__(rows, make)
        self.image = image

    def file(self, index: int) -> str | None:
        """The path of the image; None where it lies in the row itself."""
        value = self.rows[index][self.image]
        return value.get("path") if isinstance(value, Mapping) else None


def _check_images(sources: Sequence[Source]) -> None:
    for source, _, rows, column in columns_of(sources, "image"):
        if not is_image(rows.types[column]):
            raise refused(source, "image", rows.types[column], "images are needed (files, or their bytes)")


def _prepared(size: int, mean: Sequence[float], std: Sequence[float]) -> Callable[[Any], Tensor]:
    """Images of one size, their pixels around 0."""
    from torchvision import transforms

    steps = [transforms.Resize((size, size)), transforms.ToTensor(), transforms.Normalize(mean, std)]
    steps = [transforms.Grayscale(), *steps] if len(mean) == 1 else steps
    return transforms.Compose(steps)  # type: ignore[no-any-return]
