"""Image models by name, from transformers, timm, torchvision or your own class, from scratch or
pretrained."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.base_models import HUB, fetched
from oneloop.tasks.transformers_models import auto_model, is_transformers, listed

Pretrained = bool | str | None  # no weights, the public weights, or a file or folder with weights
_TIMM = "timm:"
_WEIGHTS = "model.safetensors"


def image_model(
    name: str,
    classes: Sequence[str],
    *,
    pretrained: Pretrained = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, list[str]]:
    """Build a model with an output per class; return it and lines for the log. See
    ImageClassification for ``name``, ``pretrained`` and ``trust_remote_code``. If the classes of
    the weights differ, the last layer is re-initialized. Raise ValueError."""
    if is_transformers(name):
        if isinstance(pretrained, str):
            raise ValueError(
                f"task.model {name!r} has its own weights; remove task.pretrained {pretrained!r}"
            )
        how = {"pretrained": pretrained is not False, "trust_remote_code": trust_remote_code}
        return auto_model("AutoModelForImageClassification", name, classes, **how)
    if name.startswith(_TIMM):
        model = _timm_model(name.removeprefix(_TIMM), len(classes))
    elif "/" in name:
        raise ValueError(
            f"task.model {name!r} is not a folder saved by transformers: {name}/config.json is "
            "missing"
        )
    elif "." in name:
        model = _user_model(name, len(classes))
    else:
        model = _torchvision_model(name, len(classes))
    if pretrained in (None, False):
        return model, []
    return model, fitted(model, _load_weights(name, model, pretrained), len(classes))


def statistics(name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation of the pixels (0 to 1) that a model expects, by
    channel; default 0.5. Raise ValueError for an unknown model."""
    values: Mapping[str, Any] = {}
    if is_transformers(name):
        file = None
        with suppress(ValueError):
            file = fetched(name, "preprocessor_config.json")
        config = json.loads(file.read_text()) if file else {}
        values = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    elif name.startswith(_TIMM):
        import timm

        _check_timm_name(name.removeprefix(_TIMM))
        values = vars(timm.get_pretrained_cfg(name.removeprefix(_TIMM), allow_unregistered=True))
    return values.get("mean") or [0.5] * 3, values.get("std") or [0.5] * 3


def described(
    name: str,
    classes: Sequence[str],
    size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
) -> dict[str, dict[str, Any]]:
    """Return the files that describe a saved model, as JSON values by name: classes by index, input
    ``size`` (channels, height, width), and statistics of the pixels. The formats are those of
    transformers and timm, else oneloop's."""
    if is_transformers(name):
        how = {
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 2,
        }
        side = {"height": size[1], "width": size[2]}
        pixels = {
            "size": side,
            "rescale_factor": 1 / 255,
            "image_mean": list(mean),
            "image_std": list(std),
        }
        return {
            "preprocessor_config.json": {
                "image_processor_type": "ViTImageProcessor",
                **how,
                **pixels,
            }
        }
    pixels = {
        "input_size": list(size),
        "mean": list(mean),
        "std": list(std),
        "interpolation": "bilinear",
    }
    if name.startswith(_TIMM):
        labels = {"num_classes": len(classes), "label_names": list(classes)}
        config = {**pixels, "crop_pct": 1.0, "crop_mode": "squash", **labels}
        return {
            "config.json": {
                "architecture": name.removeprefix(_TIMM),
                **labels,
                "pretrained_cfg": config,
            }
        }
    return {
        "config.json": {
            "oneloop": "image_classification",
            "model": name,
            "classes": list(classes),
            **pixels,
        }
    }


def _check_timm_name(name: str) -> None:
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"task.model timm:{name} needs timm, which is not installed; pip install timm"
        ) from error
    if not timm.is_model(name):
        near = get_close_matches(name.partition(".")[0], timm.list_models(), n=3)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ValueError(
            f"task.model timm:{name} is not one of timm's {len(timm.list_models()):,} models{hint}"
        )


def _timm_model(name: str, classes: int) -> nn.Module:
    _check_timm_name(name)
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes)
    return model


def _torchvision_model(name: str, classes: int) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        own = f"one of torchvision's {len(known)} classification models (resnet18, vit_b_16, …)"
        names = f"cnn, a folder saved by transformers, hf:ID, timm:NAME, module.Class or {own}"
        raise ValueError(f"task.model {name!r} is unknown; use {names}")
    model: nn.Module = models.get_model(name, num_classes=classes)
    return model


def _user_model(path: str, classes: int) -> nn.Module:
    module, _, attribute = path.rpartition(".")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"task.model {path!r} is in Python's standard library, which has no models"
        )
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
    """Load weights, without the last layer if their classes differ; return lines for the log. Raise
    ValueError if the weights are of another model."""
    own = model.state_dict()
    mismatched = {
        name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape
    }
    missing = own.keys() - weights.keys() - _tied_names(model, weights)
    layers = _head_layers(model, mismatched, classes)
    new = {name for name in (*missing, *mismatched) if name.rpartition(".")[0] in layers}
    errors = {"missing": sorted(missing - new), "unexpected": sorted(weights.keys() - own.keys())}
    errors |= {"shape mismatch": sorted(mismatched - new)}
    if any(errors.values()):
        found = listed(errors)
        raise ValueError(
            f"task.pretrained: the weights do not fit this model ({found}); set task.model to match"
        )
    with torch.no_grad():
        for name in (own.keys() & weights.keys()) - mismatched:
            own[name].copy_(weights[name])
    layers = {name.rpartition(".")[0] for name in new}
    return (
        [f"the last layer ({', '.join(sorted(layers))}) is re-initialized: the classes differ"]
        if new
        else []
    )


def _tied_names(model: nn.Module, weights: Mapping[str, Tensor]) -> set[str]:
    """Return names of tied tensors of which the weights contain at least one name."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {
        name
        for aliases in names.values()
        if any(name in weights for name in aliases)
        for name in aliases
    }


def _head_layers(model: nn.Module, mismatched: Iterable[str], classes: int) -> set[str]:
    """Return the layers with one output per class, among timm's classifiers and layers with a
    different shape."""
    config = getattr(model, "pretrained_cfg", None) or {}
    classifier = config.get("classifier") or ()
    layers = {name.rpartition(".")[0] for name in mismatched} | (
        {classifier} if isinstance(classifier, str) else set(classifier)
    )
    modules = dict(model.named_modules())
    outputs = {
        name: getattr(
            modules.get(name), "out_features", getattr(modules.get(name), "out_channels", 0)
        )
        for name in layers
    }
    return {name for name, number in outputs.items() if name and number == classes}


def _load_weights(name: str, model: nn.Module, pretrained: bool | str | None) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if pretrained is True:
        hub = getattr(model, "pretrained_cfg", {}).get("hf_hub_id")
        if not hub:
            why = f"the public weights of {name!r} are pickles, which are never loaded"
            raise ValueError(
                f"task.pretrained: {why}; give a .safetensors file, or a timm: or hf: model"
            )
        pretrained = f"{HUB}{hub}"
    path = Path(str(pretrained)).expanduser()
    file = path if path.is_file() else fetched(str(pretrained), _WEIGHTS)
    if file is None:
        advice = "give a .safetensors file, or a folder that contains one"
        raise ValueError(f"task.pretrained {str(pretrained)!r} has no {_WEIGHTS}; {advice}")
    if file.suffix != ".safetensors":
        raise ValueError(
            f"task.pretrained {file} is not a .safetensors file; oneloop never loads pickled "
            "weights"
        )
    try:
        return dict(load_file(file))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"task.pretrained {file} cannot be read: {error}") from error
