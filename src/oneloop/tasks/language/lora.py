"""Low-rank adapters with peft: add them to a model, load, save and merge them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import BaseModel, place_of
from oneloop.tasks.language.lora_settings import CONFIG, PEFT_PREFIX, WEIGHTS, Adapters, LoRA
from oneloop.tasks.language.models import import_quietly, plain_layer, quantized, to_source_class
from oneloop.tasks.transformers_models import commit_of, content_of_model, file_stats

_NAME = "default"  # adapter name in peft
_OWN_NAME = re.compile(rf"(\.lora_\w+)\.{_NAME}(?=\.|$)")


def add_adapters(
    model: nn.Module, wanted: Adapters, *, stats: object = None
) -> tuple[BaseModel, str]:
    """Add float32 adapters to a model in place, and freeze the rest. ``stats``: :func:`file_stats`
    before it was read. Return the base model and a log line. Raise ValueError if a target matches
    no linear layer."""
    import_quietly()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "task.lora needs peft, which is not installed (pip install peft)"
        ) from error
    settings = wanted.settings
    assert settings.rank is not None
    layers = _targets(model, settings.targets)
    path, revision = place_of(wanted.base)
    commit = commit_of(wanted.base)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path if commit else str(Path(path).resolve()),
        revision=commit or revision,
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,  # type: ignore[arg-type]
        use_rslora=settings.rslora,
        lora_dropout=settings.dropout,
        target_modules=_target_names(layers, model),
        fan_in_fan_out=all(
            type(model.get_submodule(layer)).__name__ == "Conv1D" for layer in layers
        ),
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    settings_text = {
        "lora_alpha": settings.alpha,
        "use_rslora": settings.rslora,
        "quantize": _quantization(settings),
    }
    peft_name = lambda name: PEFT_PREFIX + _OWN_NAME.sub(r"\1", name)  # noqa: E731
    content, quick_check = (
        (lambda: content_of_model(wanted.base, commit)),
        (lambda: file_stats(wanted.base)),
    )
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = frozenset(
        model.state_dict().keys() - own - {name for name, _ in model.named_buffers()}
    )
    origin = BaseModel(wanted.base, frozen, content, WEIGHTS, peft_name, settings_text, quick_check)
    if stats not in (None, file_stats(wanted.base)):
        raise ValueError(f"task.model {wanted.base!r} was changed while it was loaded; start again")
    before = None if wanted.given is None else _load_adapters(model, wanted.given, origin)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    line = f"LoRA of rank {settings.rank}, {count:,} parameters on {len(layers)} layers ({kinds})"
    line += f" in 4 bits ({settings.quantize})" if settings.quantize else ""
    if before is not None and before != _quantization(settings):
        line += (
            f"; the adapters were trained on the base model {before or 'unquantized'}, see "
            "task.lora.quantize"
        )
    return origin, line


def _quantization(settings: LoRA) -> str:
    """Return the quantization of the frozen layers as text; empty if there is none."""
    if settings.quantize is None:
        return ""
    return f"in 4 bits ({settings.quantize}{', double' if settings.double_quant else ''})"


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    kinds = ("Conv1D", "Linear4bit")
    return [
        name
        for name, module in model.named_modules()
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ in kinds)
    ]


def _matches(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _targets(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    linear = _linear_layers(model)
    if isinstance(targets, str):
        return linear
    known = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in linear))
    for end in targets:
        if not any(_matches(layer, end) for layer in linear):
            kinds = [
                type(module).__name__
                for name, module in model.named_modules()
                if _matches(name, end)
            ]
            problem = (
                f"matches {kinds[0]}, which supports no adapters"
                if kinds
                else "matches no layer of the model"
            )
            raise ValueError(f"task.lora.targets {end!r} {problem}; its linear layers are {known}")
    return [layer for layer in linear if any(_matches(layer, end) for end in targets)]


def _target_names(layers: Sequence[str], model: nn.Module) -> list[str]:
    """Return the last parts of the layers' names if they match no other module, else the full
    names."""
    ends = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
    others = {name for name, _ in model.named_modules()} - set(layers)
    short = not any(_matches(name, end) for name in others for end in ends)
    return sorted(ends) if short else sorted(layers)


@torch.no_grad()
def _load_adapters(model: nn.Module, folder: Path, origin: BaseModel) -> str | None:
    """Load the adapters of a folder into a model; return the quantization of their training (None:
    unknown)."""
    from safetensors.torch import load_file

    saved = load_file(folder / f"{WEIGHTS}.safetensors")
    file = folder / "MANIFEST.json"
    base = json.loads(file.read_text()).get("about", {}).get("base") if file.is_file() else None
    if other := origin.of_another(json.loads((folder / CONFIG).read_text()), base):
        raise ValueError(
            f"task.model {folder}: its adapters were trained on {other}; restore that base model"
        )
    own = {
        origin.outside(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    wrong = sorted(own.keys() ^ saved.keys()) or [
        name for name in own if own[name].shape != saved[name].shape
    ]
    if wrong:
        names = f"its {CONFIG} names {origin.place}"
        raise ValueError(f"{folder}: its adapters are of another model: {wrong[0]}, …; {names}")
    for name, parameter in own.items():
        parameter.copy_(saved[name])
    return None if base is None else str(base.get("settings", {}).get("quantize", ""))


def save_config(model: nn.Module, folder: Path) -> None:
    """Write adapter_config.json, with which peft loads the adapters."""
    config: Any = model.peft_config[_NAME]  # type: ignore[index]
    about = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    about |= {"inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True, default=str))


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """Merge the adapters into the weights, in place, with one rounding to the weights' dtype, and
    return the model. 4-bit layers are dequantized."""
    from peft.tuners.lora import LoraLayer

    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, LoraLayer):
            layer = module.get_base_layer()
            plain = plain_layer(layer, model)
            delta = module.get_delta_weight(_NAME)  # type: ignore[operator]
            plain.weight.copy_(plain.weight.to(delta.dtype) + delta)
            _replace_module(modules, name, to_source_class(plain, layer))
        elif quantized(module) and not name.endswith(".base_layer"):
            _replace_module(modules, name, to_source_class(plain_layer(module, model), module))
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    del model.peft_config
    return model


def _replace_module(modules: Mapping[str, nn.Module], name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(modules[parent], last, module)
