"""Low-rank adapters (Hu et al. 2021) on a frozen model, through peft; its matrices in 4 bits, where that is asked for
(QLoRA, Dettmers et al. 2023)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from oneloop.basics.hub import HUB, fetched, place_of
from oneloop.basics.origin import Origin
from oneloop.tasks.language.four_bits import import_quietly, plain_layer, quantized
from oneloop.tasks.transformers_models import commit_of, content_of_model

_NAME = "default"
"""that peft knows the adapter by"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"


@dataclass(frozen=True)
class LoRA:
    """Low-rank matrices beside the linear layers of a model, which alone are trained."""

    rank: int | None = None
    """of the adapters (null: none; all parameters of the model are trained)"""
    alpha: float = 32
    """adapters are scaled by alpha / rank"""
    rslora: bool = False
    """scale them by alpha / sqrt(rank) instead (Kalajdzievski 2023)"""
    dropout: float = 0.0
    """of what the adapters are given"""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """the layers that get one, by the ends of their names (q_proj, v_proj); all-linear: all but the output layer"""
    quantize: Literal["nf4", "fp4"] | None = None
    """hold the frozen matrices of the linear layers in 4 bits, by bitsandbytes"""
    double_quant: bool = True
    """quantize the scales of the 4-bit blocks too"""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"task.lora.rank {self.rank} is no adapter; 16 is usual (null: train all parameters)")
        if not self.alpha > 0:
            raise ValueError(f"task.lora.alpha {self.alpha} must be above 0; 32 is usual")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"task.lora.dropout {self.dropout} must be at least 0 and below 1")
        if not self.targets:
            raise ValueError("task.lora.targets names no layer; all-linear takes all of them")


@dataclass(frozen=True)
class Adapters:
    """What adapters a model gets."""

    base: str
    """the model: a folder, or hf:ID[@REVISION]"""
    settings: LoRA
    given: Path | None = None
    """folder of adapters that are trained on"""

    @property
    def tokenizer(self) -> str:
        """Where it lies."""
        own = self.given is not None and (self.given / "tokenizer_config.json").is_file()
        return str(self.given) if own else self.base


def adapters(model: str | None, lora: LoRA | Mapping[str, Any], *, pretrained: bool) -> Adapters | None:
    """What adapters a task's keys ask for; None: none.

    Args:
        model: of the task; the place of a model, or of adapters themselves, which name theirs.
        lora: the keys.
        pretrained: whether the model comes with its weights.

    Raises:
        ValueError: a key is out of range, or makes no sense with the others.
    """
    settings = lora if isinstance(lora, LoRA) else LoRA(**lora)
    folder = _folder_of_adapters(model) if model else None
    if folder is not None:
        assert model is not None
        if settings != LoRA(quantize=settings.quantize, double_quant=settings.double_quant):
            raise ValueError(
                f"task.model {model!r} holds adapters, which are trained on as they are; leave task.lora.* out, or put"
                " new ones on a merged model (oneloop export RUN --merged --to DIR)"
            )
        base, found = _read(folder, model)
        return Adapters(base, replace(found, quantize=settings.quantize, double_quant=settings.double_quant), folder)
    if settings.rank is None:
        if settings != LoRA():
            changed = [key for key, value in asdict(settings).items() if value != asdict(LoRA())[key]]
            raise ValueError(f"task.lora.{changed[0]} is given without task.lora.rank; 16 is usual")
        return None
    if model is None or not pretrained:
        raise ValueError(
            f"task.lora.rank {settings.rank} is asked for on a model whose weights are drawn; name a trained one with"
            " task.model, or leave task.lora.rank out"
        )
    return Adapters(model, settings)


def _folder_of_adapters(model: str) -> Path | None:
    """The folder with the adapters that ``model`` leads to; None where it leads to a model."""
    if not model.startswith(HUB):
        folder = Path(model).expanduser()
        return folder if (folder / CONFIG).is_file() and not (folder / "config.json").is_file() else None
    try:
        if fetched(model, "config.json") is not None:
            return None
        file = fetched(model, CONFIG)
        if file is None or fetched(model, f"{WEIGHTS}.safetensors") is None:
            return None
        for more in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            fetched(model, more)
    except ValueError as error:
        raise ValueError(f"task.model {error}") from error
    return file.parent


def _read(folder: Path, model: str) -> tuple[str, LoRA]:
    """The model that adapters are of, and what they are."""
    about = json.loads((folder / CONFIG).read_text())
    others: dict[str, Any] = {
        "use_dora": False,
        "modules_to_save": None,
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    others |= {"target_parameters": None, "layers_to_transform": None, "lora_bias": False, "peft_type": "LORA"}
    strange = [f"{key} {about[key]}" for key, usual in others.items() if (about.get(key) or usual) != usual]
    base = about.get("base_model_name_or_path")
    if strange or not base or not (isinstance(about.get("r"), int) and about.get("target_modules")):
        raise ValueError(f"task.model {model!r}: adapters of another kind than LoRA's own ({', '.join(strange)})")
    revision = f"@{about['revision']}" if about.get("revision") else ""
    place = base if (Path(base).expanduser() / "config.json").is_file() else f"{HUB}{base}{revision}"
    targets = about["target_modules"]
    found = LoRA(
        rank=about["r"],
        alpha=about.get("lora_alpha", 8),
        rslora=bool(about.get("use_rslora")),
        dropout=about.get("lora_dropout", 0.0),
        targets=targets if targets == "all-linear" else sorted([targets] if isinstance(targets, str) else targets),
    )
    return place, found


def put_on(model: nn.Module, wanted: Adapters) -> tuple[Origin, str]:
    """Puts adapters on a model, in place: in float32, whatever the model is in, which is frozen.

    Returns:
        What the model was read from, and a line for a person.

    Raises:
        ValueError: the targets match no layer, or ones that can have no adapter; or the adapters given are of others.
    """
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
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    origin = Origin(
        wanted.base,
        frozenset(model.state_dict().keys() - own - buffers),
        lambda: content_of_model(wanted.base, commit),
        WEIGHTS,
        lambda name: f"base_model.model.{name.replace(f'.{_NAME}', '')}",
        {"lora_alpha": settings.alpha, "use_rslora": settings.rslora},
    )
    if wanted.given is not None:
        _fill(model, wanted.given, origin)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    line = f"LoRA of rank {settings.rank}, {count:,} parameters beside {len(layers)} layers ({kinds})"
    return origin, line + (f" in 4 bits ({settings.quantize})" if settings.quantize else "")


def _linear(model: nn.Module) -> list[str]:
    """Names of the linear layers, the output layer and embeddings left out."""
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
    """The layers that get adapters."""
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
def _fill(model: nn.Module, folder: Path, origin: Origin) -> None:
    from safetensors.torch import load_file

    loaded = load_file(folder / f"{WEIGHTS}.safetensors")
    own = {origin.outside(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = sorted(own.keys() ^ loaded.keys()) or [name for name in own if own[name].shape != loaded[name].shape]
    if wrong:
        raise ValueError(
            f"{folder}: its adapters are of another model: {wrong[0]}, …; its {CONFIG} names {origin.place}"
        )
    for name, parameter in own.items():
        parameter.copy_(loaded[name])


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
            into = plain_layer(module.get_base_layer(), model)
            delta = module.get_delta_weight(_NAME)  # type: ignore[operator]
            into.weight.copy_(into.weight.to(delta.dtype) + delta)
            _put(modules, name, into)
        elif quantized(module) and not name.endswith(".base_layer"):
            _put(modules, name, plain_layer(module, model))
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
