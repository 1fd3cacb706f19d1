"""Low-rank adapters with peft: add them to a model, load and merge them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.base_models import BaseModel, place_of
from oneloop.basics.untrusted import read_json
from oneloop.tasks.language.lora_settings import CONFIG, PEFT_PREFIX, WEIGHTS, Adapters
from oneloop.tasks.language.models import import_quietly
from oneloop.tasks.transformers_models import commit_of, content_of_model, file_stats

_NAME = "default"  # adapter name in peft


def add_adapters(
    model: nn.Module,
    wanted: Adapters,
    *,
    task: str = "CAUSAL_LM",
    head: str = "",
) -> tuple[BaseModel, str]:
    """Add float32 adapters to a model in place, and freeze the rest.

    Args:
        model: a pretrained model of transformers.
        wanted: the base model, the settings, and the folder of existing adapters.
        task: peft's name of the kind of task.
        head: name of a new layer that is trained as a whole, and saved with the adapters ("":
            none).

    Returns:
        The base model, and a line for the log.

    Raises:
        ValueError: peft is missing, a target matches no linear layer, existing adapters do not
            fit.
    """
    import_quietly()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "task.lora needs peft, which is not installed (pip install peft)"
        ) from error
    settings = wanted.settings
    alpha = settings.alpha
    assert settings.rank is not None
    layers = _layers_with_adapters(model, settings.targets, head)

    # Add the adapters, in float32; peft also freezes all other parameters.
    config = LoraConfig(
        task_type=task,
        r=settings.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        use_rslora=settings.rslora,
        lora_dropout=settings.dropout,
        target_modules=layers,
        # GPT-2's layers store the transposed weight.
        fan_in_fan_out=type(model.get_submodule(layers[0])).__name__ == "Conv1D",
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    if head:
        model.get_submodule(head).requires_grad_(True)
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
            parameter.data = parameter.data.float()

    # Describe them as peft does. The base model is a commit on the hub, or an absolute path.
    path, revision = place_of(wanted.base)
    commit = commit_of(wanted.base)
    config.base_model_name_or_path = path if commit else str(Path(path).resolve())
    config.revision = commit or revision
    config.target_modules = sorted(config.target_modules or [])
    config.modules_to_save = [head] if head else None
    config.inference_mode = True

    # Say how the frozen layers are quantized.
    quantization = ""
    if settings.quantize:
        double = ", double" if settings.double_quant else ""
        quantization = f"in 4 bits ({settings.quantize}{double})"

    # Checkpoints store the trained tensors and the buffers, and refer to the base model for others.
    buffers = dict(model.named_buffers())
    frozen = frozenset(model.state_dict().keys() - trained.keys() - buffers.keys())
    origin = BaseModel(
        place=wanted.base,
        names=frozen,
        look=lambda: content_of_model(wanted.base, commit),
        file=WEIGHTS,
        outside=_name_in_peft,
        settings={
            "lora_alpha": settings.alpha,
            "use_rslora": settings.rslora,
            "quantize": quantization,
        },
        seen=lambda: file_stats(wanted.base),
    )

    # Continue with existing adapters, perhaps on a base model that is quantized in another way.
    count = sum(parameter.numel() for parameter in trained.values())
    kinds = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
    line = f"LoRA of rank {settings.rank}, {count:,} parameters on {len(layers)} layers "
    line += f"({', '.join(kinds)}) {quantization}".rstrip()
    if wanted.given is not None:
        before = _load_adapters(trained, wanted.given, origin)
        if before not in (None, quantization):
            line += (
                f"; the adapters were trained on the base model {before or 'unquantized'}, see "
                "task.lora.quantize"
            )
    return origin, line


def _name_in_peft(name: str) -> str:
    """Return the name of a tensor of the model in peft's files."""
    return PEFT_PREFIX + name.replace(f".{_NAME}.", ".")


def _layers_with_adapters(model: nn.Module, targets: str | Sequence[str], head: str) -> list[str]:
    """Return the names of the layers with an adapter. Raise ValueError if a target has none."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    linear = []
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and module is not output and name != head:
            linear.append(name)
    if isinstance(targets, str):
        return linear

    # A target is the end of a name.
    chosen = set[str]()
    for target in targets:
        matching = {name for name in linear if f".{name}".endswith(f".{target}")}
        if not matching:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise ValueError(
                f"task.lora.targets {target!r} matches no layer that can have an adapter; the "
                f"model's linear layers, without its output layer, are {', '.join(ends)}"
            )
        chosen |= matching
    return sorted(chosen)


@torch.no_grad()
def _load_adapters(trained: Mapping[str, Tensor], folder: Path, origin: BaseModel) -> str | None:
    """Load the adapters of a folder into the trained parameters of a model.

    Returns:
        The quantization of their training (None: unknown).

    Raises:
        ValueError: they were trained on another base model, or do not fit this one.
    """
    from safetensors.torch import load_file

    # oneloop's manifest describes the base model exactly; peft's config only has its name.
    saved = load_file(folder / f"{WEIGHTS}.safetensors")
    manifest = folder / "MANIFEST.json"
    about = read_json(manifest).get("about", {}) if manifest.is_file() else {}
    base = about.get("base")
    other = origin.of_another(read_json(folder / CONFIG), base)
    if other:
        raise ValueError(
            f"task.model {folder}: its adapters were trained on {other}; restore that base model"
        )

    # Compare names and shapes before anything is changed.
    own = {origin.outside(name): parameter for name, parameter in trained.items()}
    wrong = {(name, tensor.shape) for name, tensor in own.items()}
    wrong ^= {(name, tensor.shape) for name, tensor in saved.items()}
    if wrong:
        raise ValueError(
            f"{folder}: its adapters are of another model: {min(wrong)[0]}, …; "
            f"its {CONFIG} names {origin.place}"
        )
    for name, parameter in own.items():
        parameter.copy_(saved[name])
    if base is None:
        return None
    return str(base.get("settings", {}).get("quantize", ""))


def save_config(model: nn.Module, folder: Path) -> None:
    """Write adapter_config.json, with which peft loads the adapters."""
    model.peft_config[_NAME].save_pretrained(folder)  # type: ignore[index,union-attr,operator]


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """Merge the adapters into the weights, in place, and return the model.

    The sum is rounded once, to the weights' dtype. 4-bit layers are dequantized.
    """
    from peft.tuners.lora import LoraLayer

    # Replace each layer by a plain one; 4-bit layers without adapters, too.
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            delta = module.get_delta_weight(_NAME)  # type: ignore[operator]
            model.set_submodule(name, _plain_layer(module.get_base_layer(), model, delta))
        elif _is_quantized(module) and not name.endswith(".base_layer"):
            model.set_submodule(name, _plain_layer(module, model))

    # Remove the traces of quantization and peft, with which transformers would save another model.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.requires_grad_(True)
    del model.peft_config
    return model


def _is_quantized(layer: Any) -> bool:
    """Whether a module is a 4-bit linear layer."""
    return type(layer).__name__ == "Linear4bit" and hasattr(layer, "quant_state")


def _plain_layer(layer: Any, model: nn.Module, delta: Tensor | float = 0.0) -> nn.Module:
    """Return a layer whose weight is the sum with ``delta``; a 4-bit layer is dequantized.

    A dequantized layer has the dtype of the model, and the class from before the quantization.
    """
    if not _is_quantized(layer):
        layer.weight.add_(delta)
        return layer  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    weight = weight.to(model.dtype).add_(delta)  # type: ignore[arg-type]
    has_bias = layer.bias is not None
    plain: Any = nn.Linear(layer.in_features, layer.out_features, bias=has_bias)
    if layer.source_cls is Conv1D:
        # GPT-2's linear layers store the transposed weight.
        plain = Conv1D(layer.out_features, layer.in_features)
        weight = weight.T.contiguous()
    plain.weight.data = weight
    if has_bias:
        plain.bias.data = layer.bias.data
    return plain  # type: ignore[no-any-return]
