"""Image models by name, from scratch or pretrained.

They come from transformers, timm, torchvision or your own class. The small CNN is here, too.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.base_models import HUB, fetched
from oneloop.basics.parameter_names import tied_to
from oneloop.basics.untrusted import read_json
from oneloop.tasks.image_settings import Pretrained, Resizing
from oneloop.tasks.transformers_models import auto_model, is_transformers, listed

_TIMM = "timm:"
_WEIGHTS = "model.safetensors"
_PILLOW = {"nearest": 0, "bilinear": 2, "bicubic": 3}
"""Pillow's number of each interpolation"""


class Statistics(NamedTuple):
    """Statistics of the pixels (0 to 1), by channel."""

    mean: Sequence[float]
    std: Sequence[float]  # standard deviation


def image_model(
    name: str,
    classes: Sequence[str],
    *,
    pretrained: Pretrained = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, list[str]]:
    """Build a model with an output per class; return it and lines for the log.

    Args:
        name: ``task.model`` of ImageClassification, apart from cnn.
        classes: names of the outputs.
        pretrained: ``task.pretrained`` of ImageClassification. If the classes of the weights
            differ, the last layer is re-initialized.
        trust_remote_code: run Python code stored with the weights.

    Raises:
        ValueError: there is no such model, or the weights do not fit it.
    """
    if is_transformers(name):
        if isinstance(pretrained, str):
            raise ValueError(
                f"task.model {name!r} has its own weights; remove task.pretrained {pretrained!r}"
            )
        return auto_model(
            "AutoModelForImageClassification",
            name,
            classes,
            pretrained=pretrained is not False,
            trust_remote_code=trust_remote_code,
        )

    # Build the model with new weights.
    if name.startswith(_TIMM):
        architecture = _timm_name(name)
        import timm

        model: nn.Module = timm.create_model(architecture, num_classes=len(classes))
    elif "/" in name:
        raise ValueError(
            f"task.model {name!r} is not a folder saved by transformers: {name}/config.json is "
            "missing"
        )
    elif "." in name:
        model = _user_model(name, len(classes))
    else:
        from torchvision import models

        names = models.list_models(module=models)
        if name not in names:
            raise ValueError(
                f"task.model {name!r} is unknown; use cnn, a folder saved by transformers, hf:ID, "
                f"timm:NAME, module.Class or one of torchvision's {len(names)} classification "
                "models (resnet18, vit_b_16, …)"
            )
        model = models.get_model(name, num_classes=len(classes))

    # Load other weights into it.
    if pretrained in (None, False):
        return model, []
    return model, fitted(model, _load_weights(name, model, pretrained), len(classes))


def statistics(
    name: str, own_mean: Sequence[float] | None = None, own_std: Sequence[float] | None = None
) -> Statistics:
    """Return the user's statistics of the pixels, else those that a model expects, else 0.5.

    Raise ValueError for an unknown model.
    """
    # Read them from the files next to the model, or from timm.
    mean = std = None
    if is_transformers(name):
        file = None
        with suppress(ValueError):
            file = fetched(name, "preprocessor_config.json")
        if file:
            config = read_json(file)
            mean = config.get("image_mean")
            std = config.get("image_std")
    elif name.startswith(_TIMM):
        architecture = _timm_name(name)
        import timm

        config = vars(timm.get_pretrained_cfg(architecture, allow_unregistered=True))
        mean = config.get("mean")
        std = config.get("std")
    return Statistics(own_mean or mean or [0.5] * 3, own_std or std or [0.5] * 3)


def described(
    name: str,
    classes: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    resizing: Resizing,
) -> dict[str, dict[str, Any]]:
    """Return the files that describe a saved model.

    The formats are those of transformers and timm, else oneloop's.

    Args:
        name: name of the model.
        classes: class names by index.
        mean: mean of the pixels (0 to 1) by channel.
        std: standard deviation of the pixels, likewise.
        resizing: how an image is resized.

    Returns:
        JSON values by file name.
    """
    center = resizing.center
    side = resizing.size
    square = {"height": side, "width": side}

    # transformers: an image processor, next to the model's own configuration.
    if is_transformers(name):
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": _PILLOW[resizing.interpolation],
            "size": square,
            "rescale_factor": 1 / 255,
            "image_mean": list(mean),
            "image_std": list(std),
        }
        if center:
            processor["image_processor_type"] = "CLIPImageProcessor"
            processor["size"] = {"shortest_edge": resizing.shorter_side}
            processor["do_center_crop"] = True
            processor["crop_size"] = square
        return {"preprocessor_config.json": processor}

    # Others: one configuration.
    pixels = {
        "input_size": [len(mean), side, side],
        "mean": list(mean),
        "std": list(std),
        "interpolation": resizing.interpolation,
        "crop_pct": center or 1.0,
        "crop_mode": "center" if center else "squash",
    }
    if name.startswith(_TIMM):
        # timm names the classes twice: for the model, and for its weights.
        labels = {"num_classes": len(classes), "label_names": list(classes)}
        config = {
            "architecture": name.removeprefix(_TIMM),
            **labels,
            "pretrained_cfg": {**pixels, **labels},
        }
    else:
        config = {
            "oneloop": "image_classification",
            "model": name,
            "classes": list(classes),
            **pixels,
        }
    return {"config.json": config}


def _timm_name(model: str) -> str:
    """Return timm's name of ``timm:NAME``. Raise ValueError if timm has no such model."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"task.model {model} needs timm, which is not installed; pip install timm"
        ) from error
    name = model.removeprefix(_TIMM)
    if not timm.is_model(name):
        names = timm.list_models()
        near = get_close_matches(name.partition(".")[0], names, n=3)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ValueError(f"task.model {model} is not one of timm's {len(names):,} models{hint}")
    return name


def _user_model(path: str, classes: int) -> nn.Module:
    module, _, attribute = path.rpartition(".")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"task.model {path!r} is in Python's standard library, which has no models"
        )

    # Import the class, which may be in the current folder, and call it.
    try:
        model = getattr(import_module(module), attribute)(num_classes=classes)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"task.model {path!r} cannot be built with num_classes={classes}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"task.model {path!r} returned a {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


def fitted(model: nn.Module, weights: Mapping[str, Any], classes: int) -> list[str]:
    """Load weights, without the last layer if their classes differ.

    Args:
        model: the model; its parameters are changed in place.
        weights: tensors by name.
        classes: number of classes of the model.

    Returns:
        Lines for the log.

    Raises:
        ValueError: the weights are of another model.
    """
    # Compare the names and shapes.
    own = model.state_dict()
    shared = own.keys() & weights.keys()
    mismatched = {name for name in shared if own[name].shape != weights[name].shape}
    missing = own.keys() - weights.keys() - tied_to(model, weights.keys())

    # The last layer may be missing if timm names it, or have another shape.
    layers = {name.rpartition(".")[0] for name in mismatched}
    config = getattr(model, "pretrained_cfg", None) or {}
    classifier = config.get("classifier") or ()  # a name, or several
    layers.update([classifier] if isinstance(classifier, str) else classifier)

    # It has an output per class. A layer without a name is the model itself.
    heads = set[str]()
    for name, layer in model.named_modules():
        outputs = getattr(layer, "out_features", getattr(layer, "out_channels", 0))
        if name and name in layers and outputs == classes:
            heads.add(name)
    new = {name for name in (*missing, *mismatched) if name.rpartition(".")[0] in heads}
    errors = {
        "missing": sorted(missing - new),
        "unexpected": sorted(weights.keys() - own.keys()),
        "shape mismatch": sorted(mismatched - new),
    }
    if any(errors.values()):
        raise ValueError(
            f"task.pretrained: the weights do not fit this model ({listed(errors)}); set "
            "task.model to match"
        )

    # Copy the rest.
    with torch.no_grad():
        for name in shared - mismatched:
            own[name].copy_(weights[name])
    if not new:
        return []
    renewed = ", ".join(sorted({name.rpartition(".")[0] for name in new}))
    return [f"the last layer ({renewed}) is re-initialized: the classes differ"]


def _load_weights(name: str, model: nn.Module, pretrained: bool | str | None) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # Find the public weights of a timm model on the hub.
    if pretrained is True:
        hub = getattr(model, "pretrained_cfg", {}).get("hf_hub_id")
        if not hub:
            raise ValueError(
                f"task.pretrained: the public weights of {name!r} are pickles, which are never "
                "loaded; give a .safetensors file, or a timm: or hf: model"
            )
        pretrained = f"{HUB}{hub}"

    # Find the file.
    path = Path(str(pretrained)).expanduser()
    file = path if path.is_file() else fetched(str(pretrained), _WEIGHTS)
    if file is None:
        raise ValueError(
            f"task.pretrained {str(pretrained)!r} has no {_WEIGHTS}; give a .safetensors file, or "
            "a folder that contains one"
        )
    if file.suffix != ".safetensors":
        raise ValueError(
            f"task.pretrained {file} is not a .safetensors file; oneloop never loads pickled "
            "weights"
        )
    try:
        return dict(load_file(file))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"task.pretrained {file} cannot be read: {error}") from error


class Quarters(nn.Module):
    """Average pooling to 2 x 2, the mean of each quarter, as ``nn.AdaptiveAvgPool2d(2)``.

    The gradient of adaptive pooling is not deterministic on a GPU, that of plain pooling is. An odd
    size has a middle row or column, which both quarters count.
    """

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        quarter = ((height + 1) // 2, (width + 1) // 2)
        step = (max(1, height // 2), max(1, width // 2))
        pooled = F.avg_pool2d(images, quarter, step)
        # A size of 1 is its own quarter.
        return pooled.expand(*images.shape[:-2], 2, 2)


class CNN(nn.Module):
    """Three convolutions with GroupNorm, without batch statistics; dropout is off by default.

    It uses average pooling: in max pooling, rounding can decide a near-tie and so redirect the
    gradient. Two parallel layouts would then differ by 1e-3 after 40 float32 steps instead of 1e-7.

    Args:
        channels: channels of the images.
        classes: number of classes.
        width: channels of the first layer; the others have 2 and 4 times as many.
        dropout: dropout before the last layer.
    """

    def __init__(
        self, channels: int, classes: int, *, width: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        widths = (channels, width, 2 * width, 4 * width)
        for inside, outside in pairwise(widths):
            layers += [
                nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                nn.GroupNorm(8, outside),
                nn.GELU(),
            ]
            if inside != channels:
                layers.append(nn.AvgPool2d(2))
        self.features = nn.Sequential(*layers, Quarters(), nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(16 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]
