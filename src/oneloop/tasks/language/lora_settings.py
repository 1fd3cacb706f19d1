"""Low-rank adapters (Hu et al. 2021) on a frozen model, through peft; its matrices in 4 bits, where that is asked for
(QLoRA, Dettmers et al. 2023)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oneloop.basics.base_models import HUB, fetched

OUTSIDE = "base_model.model."
"""before every name in peft's files"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"


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
    """layers with an adapter, by the ends of their names (q_proj, v_proj); all-linear: all except the output layer"""
    quantize: Literal["nf4", "fp4"] | None = None
    """quantize the frozen linear layers to 4 bits (bitsandbytes)"""
    double_quant: bool = True
    """also quantize the scales of the 4-bit blocks"""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"task.lora.rank {self.rank} must be at least 1 (common: 16; null: train all parameters)")
        if not self.alpha > 0:
            raise ValueError(f"task.lora.alpha {self.alpha} must be above 0 (common: 32)")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"task.lora.dropout {self.dropout} must be at least 0 and below 1")
        if self.quantize is None and not self.double_quant:
            raise ValueError("task.lora.double_quant false requires task.lora.quantize (common: nf4)")
        if not self.targets or "" in [*self.targets]:
            raise ValueError("task.lora.targets is empty; all-linear selects all linear layers")


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
            ways = "remove task.lora.* (except quantize), or add others to a merged model (oneloop export RUN --merged)"
            raise ValueError(f"task.model {model!r} holds adapters, which continue training as they are; {ways}")
        base, found = _read(folder, model)
        return Adapters(base, replace(found, quantize=settings.quantize, double_quant=settings.double_quant), folder)
    if settings.rank is None:
        if settings != LoRA():
            changed = [key for key, value in asdict(settings).items() if value != asdict(LoRA())[key]]
            raise ValueError(f"task.lora.{changed[0]} requires task.lora.rank (common: 16)")
        return None
    if model is None or not pretrained:
        advice = "name a trained one with task.model, or remove task.lora.rank"
        raise ValueError(f"task.lora.rank {settings.rank} requires a trained model; {advice}")
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


_OURS = ("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "base_model_name_or_path", "revision")
_NOTHING = ["peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version", "fan_in_fan_out"]
_NOTHING += ["runtime_config"]
"""keys of peft's that change nothing of what adapters are"""
_USUAL: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}
_USUAL |= {"megatron_core": ("megatron.core",), "qalora_group_size": (16,)}


def _read(folder: Path, model: str) -> tuple[str, LoRA]:
    from safetensors import SafetensorError, safe_open

    try:
        about = dict(json.loads((folder / CONFIG).read_text()))
        with safe_open(folder / f"{WEIGHTS}.safetensors", "pt") as file:
            names = list(file.keys())
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"task.model {model!r}: its adapters cannot be read ({error})") from error
    strange = [
        f"{key} {value}"
        for key, value in about.items()
        if key not in (*_OURS, *_NOTHING) and value and value not in _USUAL.get(key, ())
    ]
    if strange or about.get("peft_type") != "LORA":
        kind = ", ".join(strange) or f"peft_type {about.get('peft_type')}"
        raise ValueError(f"task.model {model!r}: adapters of another kind than LoRA's own ({kind})")
    base, rank, alpha = (about.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha"))
    if not base or not isinstance(rank, int) or not isinstance(alpha, int | float):
        needs = f"must set base_model_name_or_path, r and lora_alpha; found {base}, {rank}, {alpha}"
        raise ValueError(f"task.model {model!r}: its {CONFIG} {needs}")
    place = str(base)
    if not (Path(place).expanduser() / "config.json").is_file():
        if Path(place).is_absolute() or place.count("/") > 1:
            raise ValueError(f"task.model {model!r}: its adapters are for {place}, which is missing; restore it")
        place = f"{HUB}{place}" + (f"@{about['revision']}" if about.get("revision") else "")
    layers = {name.removeprefix(OUTSIDE).partition(".lora_")[0] for name in names if ".lora_" in name}
    how: dict[str, Any] = {"rslora": bool(about.get("use_rslora")), "dropout": about.get("lora_dropout") or 0.0}
    found = LoRA(rank=rank, alpha=alpha, targets=sorted(layers), **how)
    return place, found
