"""Settings of LoRA (Hu et al. 2021) on a frozen model.

The frozen layers may be in 4 bits (QLoRA, Dettmers et al. 2023).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oneloop.basics.base_models import HUB, fetched
from oneloop.basics.untrusted import read_json

PEFT_PREFIX = "base_model.model."
"""prefix of every name in peft's files"""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model"
"""name of the file of the adapters, without .safetensors"""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of linear layers; all other parameters are frozen."""

    rank: int | None = None
    """rank of the adapters (null: no adapters; all parameters are trained)"""
    alpha: float = 32
    """scale of the adapters is alpha / rank"""
    rslora: bool = False
    """use the scale alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)"""
    dropout: float = 0.0
    """dropout of the adapters' inputs"""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """layers with an adapter, by the ends of their names (q_proj, v_proj); all-linear: all except
    the output layer"""
    quantize: Literal["nf4", "fp4"] | None = None
    """quantize the frozen linear layers to 4 bits (bitsandbytes)"""
    double_quant: bool = True
    """also quantize the scales of the 4-bit blocks"""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(
                f"task.lora.rank {self.rank} must be at least 1 (common: 16; null: train all "
                "parameters)"
            )
        if not self.alpha > 0:
            raise ValueError(f"task.lora.alpha {self.alpha} must be above 0 (common: 32)")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"task.lora.dropout {self.dropout} must be at least 0 and below 1")
        if self.quantize is None and not self.double_quant:
            raise ValueError(
                "task.lora.double_quant false requires task.lora.quantize (common: nf4)"
            )
        if not self.targets or "" in [*self.targets]:
            raise ValueError("task.lora.targets is empty; all-linear selects all linear layers")


@dataclass(frozen=True)
class Adapters:
    """Base model and settings of the adapters of a task."""

    base: str
    """base model: a folder, or hf:ID[@REVISION]"""
    settings: LoRA
    given: Path | None = None
    """folder of existing adapters, whose training continues"""

    @property
    def tokenizer(self) -> str:
        """Path or name of the tokenizer."""
        if self.given is not None and (self.given / "tokenizer_config.json").is_file():
            return str(self.given)
        return self.base


def adapters(
    model: str | None, lora: LoRA | Mapping[str, Any], *, pretrained: bool
) -> Adapters | None:
    """Return the adapters for the keys of a task; None if it has none.

    Args:
        model: the key task.model; a model, or adapters that name their base model.
        lora: the keys task.lora.*.
        pretrained: whether the weights of the model are loaded.

    Raises:
        ValueError: a key is out of range, or cannot be combined with the others.
    """
    settings = lora if isinstance(lora, LoRA) else LoRA(**lora)

    # The model names existing adapters: continue with their settings.
    folder = _folder_of_adapters(model) if model else None
    if folder is not None:
        assert model is not None
        if settings != LoRA(quantize=settings.quantize, double_quant=settings.double_quant):
            raise ValueError(
                f"task.model {model!r} holds adapters, which continue training as they are; "
                "remove task.lora.* (except quantize), or add others to a merged model "
                "(oneloop export RUN --merged)"
            )
        base, saved = _read_config(folder, model)
        # Quantization belongs to the base model, so it is not in the adapters' config.
        saved = replace(saved, quantize=settings.quantize, double_quant=settings.double_quant)
        return Adapters(base, saved, given=folder)

    # No adapters: no other key may be set.
    if settings.rank is None:
        default = asdict(LoRA())
        for key, value in asdict(settings).items():
            if value != default[key]:
                raise ValueError(f"task.lora.{key} requires task.lora.rank (common: 16)")
        return None

    # New adapters.
    if model is None or not pretrained:
        raise ValueError(
            f"task.lora.rank {settings.rank} requires a trained model; "
            "name a trained one with task.model, or remove task.lora.rank"
        )
    return Adapters(model, settings)


def _folder_of_adapters(model: str) -> Path | None:
    """Return the folder of the adapters to which ``model`` refers; None if it refers to a model."""
    if not model.startswith(HUB):
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file() or not (folder / CONFIG).is_file():
            return None
        return folder
    try:
        if fetched(model, "config.json") is not None:
            return None
        file = fetched(model, CONFIG)
        if file is None or fetched(model, f"{WEIGHTS}.safetensors") is None:
            return None
        # Fetch the tokenizer into the same folder, if there is one.
        for more in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            fetched(model, more)
    except ValueError as error:
        raise ValueError(f"task.model {error}") from error
    return file.parent


_NEEDED_KEYS = ("base_model_name_or_path", "r", "lora_alpha")
_HARMLESS_KEYS = {
    # used below
    *_NEEDED_KEYS,
    "use_rslora",
    "lora_dropout",
    "target_modules",
    "revision",
    # without effect on the adapters
    "peft_type",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "fan_in_fan_out",
    "runtime_config",
}
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (["score"],),  # the head of a reward model, which is among the tensors
    "init_lora_weights": (True, "gaussian", "orthogonal"),
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}
"""values of other peft keys that do not change the adapters; false, null and empty never do"""


def _read_config(folder: Path, model: str) -> tuple[str, LoRA]:
    """Return the base model and the settings of saved adapters. Raise ValueError."""
    from safetensors import SafetensorError, safe_open

    # Read the config, and the names of the tensors.
    try:
        config = read_json(folder / CONFIG)
        with safe_open(folder / f"{WEIGHTS}.safetensors", "pt") as file:
            names = list(file.keys())
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"task.model {model!r}: its adapters cannot be read ({error})") from error

    # Reject settings that would change what the adapters compute.
    unsupported = []
    for key, value in config.items():
        allowed = _ALLOWED_VALUES.get(key, ())
        if key not in _HARMLESS_KEYS and value and value not in allowed:
            unsupported.append(f"{key} {value}")
    if unsupported or config.get("peft_type") != "LORA":
        kind = ", ".join(unsupported) or f"peft_type {config.get('peft_type')}"
        raise ValueError(f"task.model {model!r}: unsupported adapter settings ({kind})")
    missing = [key for key in _NEEDED_KEYS if not config.get(key)]
    if missing:
        raise ValueError(f"task.model {model!r}: its {CONFIG} must set {', '.join(missing)}")

    # A name that is not a folder with a model is one on the hub, unless it looks like a path.
    path = str(config["base_model_name_or_path"])
    if not (Path(path).expanduser() / "config.json").is_file():
        if Path(path).is_absolute() or path.count("/") > 1:
            raise ValueError(
                f"task.model {model!r}: its adapters are for {path}, which is missing; restore it"
            )
        path = f"{HUB}{path}"
        if config.get("revision"):
            path += f"@{config['revision']}"

    # Take the layers from the tensors: target_modules may be a pattern.
    adapted = [name.partition(".lora_")[0] for name in names if ".lora_" in name]
    layers = {name.removeprefix(PEFT_PREFIX) for name in adapted}
    settings = LoRA(
        rank=config["r"],
        alpha=config["lora_alpha"],
        rslora=bool(config.get("use_rslora")),
        dropout=config.get("lora_dropout") or 0.0,
        targets=sorted(layers),
    )
    return path, settings
