"""Low-rank adapters with peft: add them to a model, load, save and merge them."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import BaseModel, place_of
from oneloop.basics.untrusted import read_json
from oneloop.tasks.language.lora_settings import CONFIG, PEFT_PREFIX, WEIGHTS, Adapters, LoRA
from oneloop.tasks.language.models import import_quietly, plain_layer, quantized, to_source_class
from oneloop.tasks.transformers_models import commit_of, content_of_model, file_stats

_NAME = "default"  # adapter name in peft
_OWN_NAME = re.compile(rf"(\.lora_\w+)\.{_NAME}(?=\.|$)")


def add_adapters(
    model: nn.Module,
    wanted: Adapters,
    *,
    task: str = "CAUSAL_LM",
    head: str = "",
    stats: object = None,
) -> tuple[BaseModel, str]:
    """Add float32 adapters to a model in place, and freeze the rest.

    Args:
        model: a pretrained model of transformers.
        wanted: the base model, the settings, and the folder of existing adapters.
        task: peft's name of the kind of task.
        head: name of a new layer that is trained as a whole, and saved with the adapters ("":
            none).
        stats: :func:`file_stats` from before the model was read (None: no check).

    Returns:
        The base model, and a line for the log.

    Raises:
        ValueError: peft is missing, a target matches no linear layer, existing adapters do not
            fit, or the files of the base model changed.
    """
    import_quietly()
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "task.lora needs peft, which is not installed (pip install peft)"
        ) from error
    settings = wanted.settings
    assert settings.rank is not None
    layers = _targets(model, settings.targets, head)

    # Describe the base model as peft does: a commit on the hub, or an absolute path.
    path, revision = place_of(wanted.base)
    commit = commit_of(wanted.base)
    if commit is None:
        path = str(Path(path).resolve())
    config = _peft_config(model, settings, layers, task)
    config.base_model_name_or_path = path
    config.revision = commit or revision

    # Add the adapters, in float32; peft also freezes all other parameters. Its files name the head
    # as it is.
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    if head:
        model.get_submodule(head).requires_grad_(True)
        config.modules_to_save = [head]
    for parameter in _trained(model).values():
        parameter.data = parameter.data.float()

    # Checkpoints store the trained tensors and the buffers, and refer to the base model for others.
    buffers = dict(model.named_buffers())
    frozen = frozenset(model.state_dict().keys() - _trained(model).keys() - buffers.keys())
    origin = BaseModel(
        place=wanted.base,
        names=frozen,
        look=lambda: content_of_model(wanted.base, commit),
        file=WEIGHTS,
        outside=_name_in_peft,
        settings={
            "lora_alpha": settings.alpha,
            "use_rslora": settings.rslora,
            "quantize": _quantization(settings),
        },
        seen=lambda: file_stats(wanted.base),
    )
    # ``origin`` identifies the files as they are now, which must be those that were loaded.
    if stats not in (None, file_stats(wanted.base)):
        raise ValueError(f"task.model {wanted.base!r} was changed while it was loaded; start again")

    # Continue with existing adapters.
    before = None
    if wanted.given is not None:
        before = _load_adapters(model, wanted.given, origin)
    return origin, _log_line(model, settings, layers, before)


def _peft_config(model: nn.Module, settings: LoRA, layers: Sequence[str], task: str) -> Any:
    """Return peft's configuration of adapters for these layers."""
    from peft import LoraConfig

    # GPT-2's layers store the transposed weight.
    transposed = all(type(model.get_submodule(layer)).__name__ == "Conv1D" for layer in layers)
    return LoraConfig(
        task_type=task,
        r=settings.rank,
        lora_alpha=_whole(settings.alpha),
        use_rslora=settings.rslora,
        lora_dropout=settings.dropout,
        target_modules=_target_names(layers, model),
        fan_in_fan_out=transposed,
    )


def _whole(alpha: float) -> Any:
    """Return an integer if possible: peft's type, so that its file has 32 and not 32.0."""
    return int(alpha) if alpha == int(alpha) else alpha


def _log_line(model: nn.Module, settings: LoRA, layers: Sequence[str], before: str | None) -> str:
    """Return a line about the adapters; ``before``: quantization of their earlier training."""
    count = 0
    for parameter in _trained(model).values():
        count += parameter.numel()
    kinds = ", ".join(_last_parts(layers))
    line = f"LoRA of rank {settings.rank}, {count:,} parameters on {len(layers)} layers ({kinds})"
    if settings.quantize:
        line += f" in 4 bits ({settings.quantize})"
    if before is not None and before != _quantization(settings):
        line += (
            f"; the adapters were trained on the base model {before or 'unquantized'}, see "
            "task.lora.quantize"
        )
    return line


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    return trained


def _name_in_peft(name: str) -> str:
    """Return the name of a tensor of the model in peft's files."""
    return PEFT_PREFIX + _OWN_NAME.sub(r"\1", name)


def _quantization(settings: LoRA) -> str:
    """Return the quantization of the frozen layers as text; empty if there is none."""
    if settings.quantize is None:
        return ""
    if settings.double_quant:
        return f"in 4 bits ({settings.quantize}, double)"
    return f"in 4 bits ({settings.quantize})"


def _linear_layers(model: nn.Module, head: str) -> list[str]:
    """Return the names of all linear layers except the output layer, and the new ``head``."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    layers = []
    for name, module in model.named_modules():
        if module is output or name == head:
            continue
        if isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit"):
            layers.append(name)
    return layers


def _last_parts(layers: Iterable[str]) -> list[str]:
    """Return the last parts of the layers' names, each once."""
    return list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))


def _matching(names: Iterable[str], ends: Collection[str]) -> list[str]:
    """Return the names that are one of ``ends``, or end with a dot and one of them."""
    matching = []
    for name in names:
        if any(f".{name}".endswith(f".{end}") for end in ends):
            matching.append(name)
    return matching


def _targets(model: nn.Module, targets: str | Sequence[str], head: str) -> list[str]:
    """Return the names of the layers with an adapter. Raise ValueError if a target has none."""
    linear = _linear_layers(model, head)
    if isinstance(targets, str):
        return linear
    known = ", ".join(_last_parts(linear))
    modules = dict(model.named_modules())

    # Each target must have a layer.
    for end in targets:
        if _matching(linear, [end]):
            continue
        others = _matching(modules, [end])
        if not others:
            raise ValueError(
                f"task.lora.targets {end!r} matches no layer of the model; "
                f"its linear layers are {known}"
            )
        kind = type(modules[others[0]]).__name__
        raise ValueError(
            f"task.lora.targets {end!r} matches {kind}, which supports no adapters; "
            f"its linear layers are {known}"
        )
    return _matching(linear, targets)


def _target_names(layers: Sequence[str], model: nn.Module) -> list[str]:
    """Return names with which peft finds exactly these layers.

    These are the last parts of the names if they match no other module, else the full names.
    """
    ends = _last_parts(layers)
    others = dict(model.named_modules()).keys() - set(layers)
    if _matching(others, ends):
        return sorted(layers)
    return sorted(ends)


@torch.no_grad()
def _load_adapters(model: nn.Module, folder: Path, origin: BaseModel) -> str | None:
    """Load the adapters of a folder into a model.

    Returns:
        The quantization of their training (None: unknown).

    Raises:
        ValueError: they were trained on another base model, or do not fit this one.
    """
    from safetensors.torch import load_file

    # oneloop's manifest describes the base model exactly; peft's config only has its name.
    saved = load_file(folder / f"{WEIGHTS}.safetensors")
    manifest = folder / "MANIFEST.json"
    base = None
    if manifest.is_file():
        about = read_json(manifest).get("about", {})
        base = about.get("base")
    other = origin.of_another(read_json(folder / CONFIG), base)
    if other:
        raise ValueError(
            f"task.model {folder}: its adapters were trained on {other}; restore that base model"
        )

    # Compare names and shapes before anything is changed.
    own = {}
    for name, parameter in _trained(model).items():
        own[origin.outside(name)] = parameter
    wrong = sorted(own.keys() ^ saved.keys())
    if not wrong:
        for name, parameter in own.items():
            if parameter.shape != saved[name].shape:
                wrong.append(name)
    if wrong:
        raise ValueError(
            f"{folder}: its adapters are of another model: {wrong[0]}, …; "
            f"its {CONFIG} names {origin.place}"
        )
    for name, parameter in own.items():
        parameter.copy_(saved[name])
    if base is None:
        return None
    return str(base.get("settings", {}).get("quantize", ""))


def save_config(model: nn.Module, folder: Path) -> None:
    """Write adapter_config.json, with which peft loads the adapters."""
    config: Any = model.peft_config[_NAME]  # type: ignore[index]
    about = config.to_dict() | {"inference_mode": True}
    for key, value in about.items():
        if isinstance(value, set):
            about[key] = sorted(value)  # a set has no order, and JSON has no sets
    (folder / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True, default=str))


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """Merge the adapters into the weights, in place, and return the model.

    The sum is rounded once, to the weights' dtype. 4-bit layers are dequantized.
    """
    from peft.tuners.lora import LoraLayer

    # Replace each layer by a plain one; 4-bit layers without adapters, too.
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

    # Remove the traces of quantization and peft, with which transformers would save another model.
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
