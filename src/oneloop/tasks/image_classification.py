"""Image classification, of packaged sets (digits, MNIST, CIFAR) or your own images."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from oneloop.basics.wide_sums import on_host
from oneloop.task_protocol.protocol import RECORDED
from oneloop.tasks.augmentation import Blended, Files, Repeated, Transform
from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.columns import check_image_types, check_images
from oneloop.tasks.image_models import CNN, Statistics, described, image_model, statistics
from oneloop.tasks.image_settings import ImageSettings, Resizing
from oneloop.tasks.labels import (
    OneClass,
    are_shares,
    classes_of,
    counts_of,
    numbers_of,
    shares_of,
    weights_of,
)
from oneloop.tasks.packaged_images import NEEDS, PACKAGED, packaged
from oneloop.tasks.rows.images import labelled_image
from oneloop.tasks.rows.open_data import (
    Data,
    Source,
    SplitSets,
    named_sources,
    notes_of,
    opened,
    sets_of,
    skipped_rows,
    whole,
)
from oneloop.tasks.rows.rows import Mapped
from oneloop.tasks.transformers_models import is_transformers


class ImageClassification(OneClass, SplitSets):
    """Image classification.

    Args:
        data: digits (8x8, from scikit-learn), mnist, fashion_mnist, cifar10, cifar100; a
            folder with train/CLASS/*.png and validation/CLASS/*.png (test/ too), or CLASS/*.png; a
            file or folder of parquet or arrow; hf:NAME[:CONFIG][@REVISION]; parquet at s3://, gs://
            (not tested), hf://datasets/ or https://; or several, [{data: PATH, weight: 0.7}, …].
        model: cnn; a torchvision model name; timm:NAME; a folder saved by transformers;
            hf:ID[@REVISION]; or module.Class, called with num_classes.
        settings: the other keys, as :class:`oneloop.tasks.image_settings.ImageSettings` lists them.
    """

    _data_notes: Sequence[str] = ()
    needs = NEEDS

    def __init__(
        self,
        data: Data = "digits",
        model: str = "cnn",
        **settings: Any,
    ) -> None:
        keys = ImageSettings(**settings)
        if keys.mirror is None:
            has_letters = data in ("digits", "mnist", "fashion_mnist")
            keys = replace(keys, mirror=keys.augment and not has_letters)
        keys.check_repeats()
        self.keys = keys
        self.architecture = model
        self.columns = {"image": keys.image, "label": keys.label}
        self.skipped_rows = list[str]()
        self._class_counts = list[int]()

        # Read the data. Packaged images keep their size.
        if isinstance(data, str) and data in PACKAGED:
            keys.check_effect()
            sets, self.classes = packaged(data, keys.root, keys.download)
            labels = torch.tensor(sets["train"].labels)
            self._class_counts = labels.bincount(minlength=len(self.classes)).tolist()
            self.shape = tuple(sets["train"].images.shape[1:])
            half = [0.5] * self.shape[0]
            self._pixels = Statistics(mean=half, std=half)
        else:
            self._pixels = statistics(model, keys.mean, keys.std)
            self.shape = (3, keys.image_size, keys.image_size)
            sets = self._open(data)

        # Transform the images. A run that is loaded has no sets, and has recorded their shape.
        side = self.shape[1]
        interpolation = keys.test_interpolation or keys.interpolation
        rounds_down = is_transformers(model)
        self._tested = Resizing(keys.test_size or side, interpolation, keys.test_crop, rounds_down)
        self._evaluated = Transform(self._tested, *self._pixels)
        if sets:
            evaluated = self._evaluated.sample
            self._sets = {name: Mapped(part, evaluated) for name, part in sets.items()}
            trained = Transform(Resizing(side, keys.interpolation), *self._pixels, keys)
            images: Mapped = Mapped(sets["train"], trained.sample)
            if keys.mixup or keys.cutmix:
                images = Blended(images, len(self.classes), mixup=keys.mixup, cutmix=keys.cutmix)
            self._sets["train"] = Repeated(images, keys.repeats) if keys.repeats > 1 else images
        self.notes = list(self._data_notes)

        # Set what the loss and the metrics need, and what a run records.
        self.recorded = {"classes": self.classes, "shape": self.shape}
        self.class_weights = None
        if keys.class_weights == "none" or (keys.class_weights == "balanced" and RECORDED.get()):
            self.sample_weight = 1.0
        else:
            self.class_weights = weights_of(keys.class_weights, self.classes, self._class_counts)
        self._on_device = self.class_weights
        if not 0 <= keys.top_k < len(self.classes):
            raise ValueError(
                f"task.top_k {keys.top_k} must be below the number of classes, {len(self.classes)}"
            )

    def _open(self, data: Data) -> dict[str, Any]:
        """Return the user's data sets by split: images with class numbers or class probabilities.

        If a run has recorded the classes, return nothing.
        """
        recorded = RECORDED.get()
        if recorded:
            self.classes = recorded["classes"]
            self.shape = tuple(recorded["shape"])
            return {}

        # Open the data. Every image is decoded once, before the rows are split.
        keys = self.keys
        limit = keys.pixel_limit
        check = partial(check_images, limit=limit)
        label = "label" if isinstance(data, str) else ""  # another source may train a class
        sources = named_sources(
            data,
            self.columns,
            unreadable=keys.unreadable,
            split_by=keys.split_by,
            stream=keys.stream,
        )
        for source in sources:
            opened(source, held_out=keys.held_out, window=keys.window, check=check, label=label)

        # The labels are class probabilities, or classes.
        numbers: Mapping[str, Callable[[Any], Any]]
        if are_shares(sources):
            self.classes = shares_of(sources)
            numbers = {source.name: torch.tensor for source in sources}
        else:
            self.classes, numbers = classes_of(sources, "label")
            if keys.class_weights == "balanced":
                self._class_counts = counts_of(sources, numbers, len(self.classes))
        self._data_notes = notes_of(sources)
        self.skipped_rows = skipped_rows(sources)
        return sets_of(
            sources,
            lambda source: partial(labelled_image, source.columns, numbers[source.name], limit),
        )

    def model(self) -> nn.Module:
        if self.architecture == "cnn":
            if self.keys.pretrained:
                raise ValueError(
                    f"task.pretrained {self.keys.pretrained} does not work with task.model cnn; "
                    "use --init.from"
                )
            return CNN(
                self.shape[0], len(self.classes), width=self.keys.width, dropout=self.keys.dropout
            )
        model, notes = image_model(
            self.architecture,
            self.classes,
            pretrained=self.keys.pretrained,
            trust_remote_code=self.keys.trust_remote_code,
        )
        self.notes = [*self._data_notes, *notes]
        return model

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        # Open the rows; those to predict need no label.
        columns = dict(self.columns)
        if not labelled:
            columns["label"] = ""
        source = whole(Source(data, columns, known=self.classes), window=self.keys.window)
        check_image_types([source])

        # Choose the function from a stored label to that of a sample.
        number: Callable[[Any], Any] = int
        if labelled and are_shares([source]):
            found = len(shares_of([source]))
            if found != len(self.classes):
                raise ValueError(
                    f"{data}: probabilities of {found} classes, but the model has "
                    f"{len(self.classes)}"
                )
            number = torch.tensor
        elif labelled:
            number = numbers_of(source, "label", self.classes)
        decode = partial(labelled_image, source.columns, number, self.keys.pixel_limit)
        images = Mapped(source.parts["all"], decode)
        return Files(images, self._evaluated.sample, source.columns["image"])

    def collate(self, samples: list[tuple[Tensor, Any]]) -> dict[str, Tensor]:
        image, label = default_collate(samples)
        return {"image": image, "label": label}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        label = batch["label"]
        if self.class_weights is None:
            return torch.tensor(float(len(label)))
        weights = on_host(self.class_weights)
        if label.ndim == 1:
            return weights[label].sum()
        return (on_host(label) @ weights).sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["image"])
        logits = getattr(logits, "logits", logits)  # transformers models return an object
        label = batch["label"]
        if label.ndim == 2:
            label = label.to(logits.dtype)

        # Keep the weights on the device: copying them each time would be a host sync.
        weights = self.class_weights
        if weights is not None:
            assert self._on_device is not None
            weights = self._on_device = self._on_device.to(logits.device, logits.dtype)
        each = F.cross_entropy(
            logits, label, weights, reduction="none", label_smoothing=self.keys.smoothing
        )
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save files that describe model, classes and pixels.

        With them, transformers, timm or a script can serve the model.
        """
        if is_transformers(self.architecture):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        files = described(self.architecture, self.classes, *self._pixels, self._tested)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1))

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes), top=self.keys.top_k)

    def show(self, sample: tuple[Tensor, Any], outputs: dict[str, Tensor]) -> dict[str, Any]:
        image, label = sample
        if isinstance(label, Tensor):
            label = int(label.argmax())
        return {"image": image, **self.judged(label, outputs)}
