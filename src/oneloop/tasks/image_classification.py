"""Image classification, of packaged sets (digits, MNIST, CIFAR) or your own images."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.wide_sums import on_host
from oneloop.task_protocol.protocol import RECORDED
from oneloop.tasks.augmentation import Blended, Files, Images, Repeated, of_row, prepared
from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.columns import check_image_types, check_images
from oneloop.tasks.image_models import (
    CNN,
    Pretrained,
    Statistics,
    described,
    image_model,
    statistics,
)
from oneloop.tasks.image_settings import (
    Augmentation,
    Interpolation,
    RandomCrop,
    Resizing,
    check_effect,
    check_repeats,
    jitter_strengths,
)
from oneloop.tasks.labels import (
    OneClass,
    are_shares,
    classes_of,
    counted,
    counts_of,
    numbers_of,
    shares_of,
    weights_of,
)
from oneloop.tasks.packaged_images import NEEDS, PACKAGED, packaged
from oneloop.tasks.rows.images import labelled_image
from oneloop.tasks.rows.open_data import (
    Source,
    SplitBy,
    SplitSets,
    Unreadable,
    named_sources,
    notes_of,
    opened,
    sets_of,
    whole,
)
from oneloop.tasks.transformers_models import is_transformers


class ImageClassification(OneClass, SplitSets):
    """Image classification.

    Args:
        data: digits (8x8, packaged with scikit-learn), mnist, fashion_mnist, cifar10, cifar100; a
            folder with train/CLASS/*.png and validation/CLASS/*.png (test/ too), or CLASS/*.png; a
            file or folder of parquet or arrow; hf:NAME[:CONFIG][@REVISION]; parquet at s3://, gs://
            (not tested), hf://datasets/ or https://; or several, [{data: PATH, weight: 0.7}, …].
        model: cnn; a torchvision model name; timm:NAME; a folder saved by transformers;
            hf:ID[@REVISION]; or module.Class, called with num_classes.
        pretrained: a .safetensors file, a folder with one, or true for the public weights of the
            model (a folder or hf: loads its weights unless this is false). If the classes differ,
            the last layer is re-initialized.
        trust_remote_code: run Python code stored with the weights (only if you trust the author).
        width: channels of the first layer (cnn).
        augment: randomly shift and mirror the training images.
        mirror: randomly mirror the training images (null: as augment, but not for digits and
            letters).
        crop: random resized crops instead of shifts: the minimum share of the image (0.08 for large
            data sets; 0: off).
        crop_max: maximum share of the image of a random crop.
        crop_ratio: smallest and largest width / height of a random crop, before it is resized to a
            square (null: 3/4 and 4/3).
        randaugment: RandAugment magnitude of two operations, 1 to 30 (common: 9; 0: off).
        trivialaugment: one operation of TrivialAugment (wide), with a random magnitude.
        color_jitter: strength of random changes of brightness, contrast and saturation (0.4:
            factors from 0.6 to 1.4), or a list of three or four strengths, of which the fourth is
            that of the hue (at most 0.5).
        erasing: probability of random erasing (common: 0.25).
        mixup: alpha of mixup (common: 0.2; 0: off).
        cutmix: alpha of cutmix (common: 1.0; 0: off). With both, each image gets one of them.
        repeats: copies of each image in a step, with different augmentations (repeated
            augmentation; common: 3). A step has batch.size / repeats images. An epoch has as many
            samples as the data set, and so a share 1 / repeats of its images.
        image_size: side in pixels to which your own images are resized.
        interpolation: how the pixels of resized images are interpolated.
        test_size: side in pixels for evaluation (0: image_size).
        test_crop: for evaluation, resize the shorter side to test_size / test_crop, and crop the
            middle (crop_pct in timm; common: 0.875; 0: resize the whole image to a square).
        test_interpolation: as interpolation, for evaluation (null: the same).
        mean: mean of the pixels (0 to 1) by channel, to normalize your images (null: the model's
            values, else 0.5).
        std: standard deviation of the pixels, likewise.
        image: column of the image.
        label: column of the class, or of a list with the probability of each class.
        class_weights: weight of each class in the loss: none, balanced (equal total weight for each
            class), or a list.
        top_k: also log the top-k accuracy (common: 5; 0: off).
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        pixel_limit: maximum pixels of an image; larger images are rejected before decoding.
        unreadable: stop if an image cannot be used (oneloop check lists them), or skip such images
            and list them in environment.json.
        window: megabytes of parquet rows in memory per process.
        stream: read hf:NAME in place, by ranges of its Parquet files, instead of a download.
        root: folder of the downloaded data sets.
        download: download a missing data set.
        smoothing: label smoothing.
        dropout: dropout before the last layer (cnn).
    """

    _data_notes: Sequence[str] = ()
    needs = NEEDS

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "digits",
        model: str = "cnn",
        pretrained: Pretrained = None,
        trust_remote_code: bool = False,
        width: int = 32,
        augment: bool = True,
        mirror: bool | None = None,
        crop: float = 0.0,
        crop_max: float = 1.0,
        crop_ratio: list[float] | None = None,
        randaugment: int = 0,
        trivialaugment: bool = False,
        color_jitter: float | list[float] = 0.0,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        repeats: int = 1,
        image_size: int = 64,
        interpolation: Interpolation = "bilinear",
        test_size: int = 0,
        test_crop: float = 0.0,
        test_interpolation: Interpolation | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        image: str = "image",
        label: str = "label",
        class_weights: Literal["none", "balanced"] | list[float] = "none",
        top_k: int = 0,
        held_out: float = 0.05,
        pixel_limit: int = 89_478_485,
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        window: int = 256,
        stream: bool = False,
        root: str = "data",
        download: bool = False,
        smoothing: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        if mirror is None:
            mirror = augment and data not in ("digits", "mnist", "fashion_mnist")
        crops, jitter = RandomCrop(crop, crop_max, crop_ratio), jitter_strengths(color_jitter)
        how = Augmentation(crops, randaugment, trivialaugment, jitter, augment, mirror, erasing)
        check_repeats(repeats, is_random=bool(how != Augmentation() or mixup or cutmix))
        self.architecture = model
        self.pretrained = pretrained
        self.trust_remote_code = trust_remote_code
        self.width = width
        self.dropout = dropout
        self.columns = {"image": image, "label": label}
        self.window = window
        self.pixel_limit = pixel_limit
        self.skipped_rows = list[str]()
        self._class_counts = cast(Callable[[], list[int]], list)

        # Read the data. The side of packaged images stays, unless two sizes are needed.
        is_packaged = isinstance(data, str) and data in PACKAGED
        if is_packaged:
            sets, self._pixels = self._packaged(str(data), root, download)
            side = sets["train"].images.shape[-1] if crop or test_size or test_crop else None
        else:
            self._pixels = statistics(model, mean, std)
            side = image_size
            sets = self._open(data, held_out, unreadable, split_by, stream)

        # Transform the images. A run that is loaded has no sets, and has recorded their shape.
        trained = Resizing(side, interpolation)
        other = test_interpolation or interpolation
        self._tested = Resizing(test_size or side, other, test_crop, is_transformers(model))
        if is_packaged:
            check_effect(trained, self._tested, crop=bool(crop), same=not test_size)
        self._evaluation_transform = prepared(self._tested, *self._pixels)
        if sets:
            made = prepared(trained, *self._pixels, how)
            self._transform(sets, made, 0 if is_packaged else image_size)
            self._combine(mixup, cutmix, repeats)
        self.notes = list(self._data_notes)
        self._set_loss(class_weights, smoothing, top_k)

    def _transform(self, sets: Mapping[str, Any], make: Callable[[Any], Tensor], side: int) -> None:
        """Hold transformed images; ``make``: for training; ``side``: of the user's images, or 0."""
        self._sets = {name: Images(part, self._evaluation_transform) for name, part in sets.items()}
        self._sets["train"] = Images(sets["train"], make)
        own = (3, side, side)  # the user's first image may be damaged
        self.shape = own if side else tuple(self._sets["train"][0][0].shape)

    def _combine(self, mixup: float, cutmix: float, repeats: int) -> None:
        """Mix the training images, and repeat them."""
        images = self._sets["train"]
        if mixup or cutmix:
            images = Blended(images, len(self.classes), mixup=mixup, cutmix=cutmix)
        if repeats > 1:
            images = Repeated(images, repeats)
        self._sets["train"] = images

    def _set_loss(self, class_weights: str | list[float], smoothing: float, top_k: int) -> None:
        """Set what the loss and the metrics need, after a check, and what a run records."""
        self.recorded = {"classes": self.classes, "shape": self.shape}
        if not 0 <= smoothing < 1:
            raise ValueError(f"task.smoothing {smoothing} must be between 0 and 1; 0.1 is common")
        self.smoothing = smoothing
        self.class_weights = None
        if class_weights == "none" or (class_weights == "balanced" and RECORDED.get()):
            self.sample_weight = 1.0
        else:
            self.class_weights = weights_of(class_weights, self.classes, self._class_counts)
        self._on_device = self.class_weights
        if not 0 <= top_k < len(self.classes):
            raise ValueError(
                f"task.top_k {top_k} must be below the number of classes, {len(self.classes)}"
            )
        self.top_k = top_k

    def _packaged(self, data: str, root: str, download: bool) -> tuple[dict[str, Any], Statistics]:
        """Return a packaged data set by split, in memory, and the statistics of its pixels."""
        splits, self.classes = packaged(data, root, download)
        labels = torch.tensor(splits["train"].labels)
        self._class_counts = partial(counted, labels, len(self.classes))
        half = [0.5] * splits["train"].images.shape[1]
        return splits, Statistics(mean=half, std=half)

    def _open(
        self,
        data: str | list[dict[str, Any]],
        held_out: float,
        unreadable: Unreadable,
        split_by: SplitBy,
        stream: bool,
    ) -> dict[str, Any]:
        """Return the user's data sets by split: images with class numbers or class probabilities.

        If a run has recorded the classes, return nothing.
        """
        recorded = RECORDED.get()
        if recorded:
            self.classes = recorded["classes"]
            self.shape = tuple(recorded["shape"])
            return {}

        # Open the data. Every image is decoded once, before the rows are split.
        limit = self.pixel_limit
        skipped = self.skipped_rows if unreadable == "skip" else None
        check = partial(check_images, limit=limit, skipped=skipped)
        sources = list[Source]()
        for source in named_sources(data, self.columns, split_by=split_by, stream=stream):
            label = "label" if isinstance(data, str) else ""  # another source may train a class
            opened(source, held_out=held_out, window=self.window, check=check, label=label)
            sources.append(source)

        # The labels are class probabilities, or classes.
        if are_shares(sources):
            self.classes = shares_of(sources)
            self._data_notes = notes_of(sources)
            return sets_of(
                sources, lambda source: labelled_image(source.columns, torch.tensor, limit)
            )
        self.classes, numbers = classes_of(sources, "label")
        self._data_notes = notes_of(sources)
        self._class_counts = partial(counts_of, sources, numbers, len(self.classes))
        return sets_of(
            sources, lambda source: labelled_image(source.columns, numbers[source.name], limit)
        )

    def model(self) -> nn.Module:
        if self.architecture == "cnn":
            if self.pretrained:
                raise ValueError(
                    f"task.pretrained {self.pretrained} does not work with task.model cnn; use "
                    "--init.from"
                )
            return CNN(self.shape[0], len(self.classes), width=self.width, dropout=self.dropout)
        model, notes = image_model(
            self.architecture,
            self.classes,
            pretrained=self.pretrained,
            trust_remote_code=self.trust_remote_code,
        )
        self.notes = [*self._data_notes, *notes]
        return model

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        # Open the rows; those to predict need no label.
        columns = dict(self.columns)
        if not labelled:
            columns["label"] = ""
        source = whole(Source(data, columns, known=self.classes), window=self.window)
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
        decode = labelled_image(source.columns, number, self.pixel_limit)
        sample = partial(of_row, decode, self._evaluation_transform)
        return Files(source.parts["all"], sample, source.columns["image"])

    def collate(self, samples: list[tuple[Tensor, Any]]) -> dict[str, Tensor]:
        images, labels = zip(*samples, strict=True)
        batch = {"image": torch.stack(images)}
        if isinstance(labels[0], Tensor):
            batch["label"] = torch.stack(labels)  # class probabilities
        else:
            batch["label"] = torch.tensor(labels)
        return batch

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
            logits, label, weights, reduction="none", label_smoothing=self.smoothing
        )
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save files that describe model, classes and pixels.

        With them, transformers, timm or a script can serve the model.
        """
        if is_transformers(self.architecture):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        side = self._tested.size or self.shape[1]
        size = (self.shape[0], side, side)
        files = described(self.architecture, self.classes, size, *self._pixels, self._tested)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1))

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes), top=self.top_k)

    def show(self, sample: tuple[Tensor, Any], outputs: dict[str, Tensor]) -> dict[str, Any]:
        image, label = sample
        if isinstance(label, Tensor):
            label = int(label.argmax())
        return {"image": image, **self.judged(label, outputs)}
