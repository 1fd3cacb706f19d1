"""A model with low-rank adapters on it, by peft: put on, filled, written down, and merged."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import BaseModel, place_of
from oneloop.tasks.language.lora_settings import CONFIG, OUTSIDE, WEIGHTS, Adapters, LoRA
from oneloop.tasks.language.models import as_it_was, import_quietly, plain_layer, quantized
from oneloop.tasks.transformers_models import commit_of, content_of_model
from oneloop.tasks.transformers_models import seen as seen_of

_NAME = "default"  # that peft knows the adapter by
_OWN_NAME = re.compile(rf"(\.lora_\w+)\.{_NAME}(?=\.|$)")


def put_on(model: nn.Module, wanted: Adapters, *, seen: object = None) -> tuple[BaseModel, str]:
    """Add adapters in float32 to a model in place, and freeze it; ``seen`` is the state of the model's files before
    they were loaded. Return its origin and a line for the log. Raises ValueError if targets match no suitable layer."""
    import_quietly()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("task.lora needs peft, which is not installed (pip install 'oneloop[lora]')") from error
    settings = wanted.settings
    assert settings.rank is not None
    layers = _targets(model, settings.targets)
    where, revision = place_of(wanted.base)
    commit = commit_of(wanted.base)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=where if commit else str(Path(where).resolve()),
        revision=commit or revision,
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,  # type: ignore[arg-type]
        use_rslora=settings.rslora,
        lora_dropout=settings.dropout,
        target_modules=_ends(layers, model),
        fan_in_fan_out=all(type(model.get_submodule(layer)).__name__ == "Conv1D" for layer in layers),
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    described = {"lora_alpha": settings.alpha, "use_rslora": settings.rslora, "quantize": _in_bits(settings)}
    outside = lambda name: OUTSIDE + _OWN_NAME.sub(r"\1", name)  # noqa: E731
    look, quick = (lambda: content_of_model(wanted.base, commit)), (lambda: seen_of(wanted.base))
    origin = BaseModel(wanted.base, _frozen(model), look, WEIGHTS, outside, described, quick)
    if seen not in (None, seen_of(wanted.base)):
        raise ValueError(f"task.model {wanted.base!r} was changed while it was loaded; start again")
    before = None if wanted.given is None else _fill(model, wanted.given, origin)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    line = f"LoRA of rank {settings.rank}, {count:,} parameters on {len(layers)} layers ({kinds})"
    line += f" in 4 bits ({settings.quantize})" if settings.quantize else ""
    if before is not None and before != _in_bits(settings):
        line += f"; they were trained on it {before or 'unquantized'}, see task.lora.quantize"
    return origin, line


def _frozen(model: nn.Module) -> frozenset[str]:
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return frozenset(model.state_dict().keys() - own - {name for name, _ in model.named_buffers()})


def _in_bits(settings: LoRA) -> str:
    """How the frozen matrices are quantized, in words; empty: they are not."""
    if settings.quantize is None:
        return ""
    return f"in 4 bits ({settings.quantize}{', double' if settings.double_quant else ''})"


def _linear(model: nn.Module) -> list[str]:
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
    linear = _linear(model)
    if isinstance(targets, str):
        return linear
    there = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in linear))
    for end in targets:
        if not any(_matches(layer, end) for layer in linear):
            other = [type(module).__name__ for name, module in model.named_modules() if _matches(name, end)]
            what = f"leads to {other[0]}, which can have no adapter" if other else "matches no layer of the model"
            raise ValueError(f"task.lora.targets {end!r} {what}; its linear layers are {there}")
    return [layer for layer in linear if any(_matches(layer, end) for end in targets)]


def _ends(layers: Sequence[str], model: nn.Module) -> list[str]:
    """The shortest names that match these layers and nothing else."""
    ends = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
    others = {name for name, _ in model.named_modules()} - set(layers)
    short = not any(_matches(name, end) for name in others for end in ends)
    return sorted(ends) if short else sorted(layers)


@torch.no_grad()
def _fill(model: nn.Module, folder: Path, origin: BaseModel) -> str | None:
    """Gives a model the adapters of a folder; how the frozen matrices were quantized with which they were trained,
    where that is known."""
    from safetensors.torch import load_file

    loaded = load_file(folder / f"{WEIGHTS}.safetensors")
    file = folder / "MANIFEST.json"
    there = json.loads(file.read_text()).get("about", {}).get("base") if file.is_file() else None
    if other := origin.of_another(json.loads((folder / CONFIG).read_text()), there):
        raise ValueError(f"task.model {folder}: its adapters were trained on {other}; restore that base model")
    own = {origin.outside(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = sorted(own.keys() ^ loaded.keys()) or [name for name in own if own[name].shape != loaded[name].shape]
    if wrong:
        names = f"its {CONFIG} names {origin.place}"
        raise ValueError(f"{folder}: its adapters are of another model: {wrong[0]}, …; {names}")
    for name, parameter in own.items():
        parameter.copy_(loaded[name])
    return None if there is None else str(there.get("settings", {}).get("quantize", ""))


def save_config(model: nn.Module, folder: Path) -> None:
    """Writes what peft needs to load the adapters."""
    config: Any = model.peft_config[_NAME]  # type: ignore[index]
    about = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    about |= {"inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True, default=str))


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters added to its weights, in place, each rounded once to the type that it is in. Matrices
    in 4 bits become what they stand for."""
    from peft.tuners.lora import LoraLayer

    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, LoraLayer):
            layer = module.get_base_layer()
            into = plain_layer(layer, model)
            delta = module.get_delta_weight(_NAME)  # type: ignore[operator]
            into.weight.copy_(into.weight.to(delta.dtype) + delta)
            _put(modules, name, as_it_was(into, layer))
        elif quantized(module) and not name.endswith(".base_layer"):
            _put(modules, name, as_it_was(plain_layer(module, model), module))
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    del model.peft_config
    return model


def _put(modules: Mapping[str, nn.Module], name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(modules[parent], last, module)
