"""Common techniques for fast training, each with the recipe keys that switch it on and off."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.schema import EmaConfig, Recipe

# a key of Accelerate, not of the recipe; set by an environment variable
PRECISION = "mixed_precision"
DEFAULT = 8  # number of techniques that are tried by default


@dataclass(frozen=True)
class Machine:
    """Properties of machine and model that decide which techniques can be tried."""

    device: str
    cores: int
    blocks: bool  # whether the model has blocks, for activation checkpointing and regional compile
    convolutions: bool


Keys = dict[str, Any]


@dataclass(frozen=True)
class Technique:
    """One technique of ``oneloop worth``."""

    name: str
    about: str
    keys: Callable[[Recipe, Machine], tuple[Keys, Keys] | str]
    """the keys that switch it on, and those that switch it off; or why it cannot be tried"""


def _fused(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
    plain = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}.get(recipe.optimizer.name)
    if plain is None:
        return f"optimizer {recipe.optimizer.name} has no unfused version"
    options = {f"optimizer.{name}": value for name, value in recipe.optimizer.options.items()}
    on = {"optimizer.name": recipe.optimizer.name, **options}
    off = {"optimizer.name": plain, **options}
    return on, off


def _accumulation(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
    size = recipe.batch.size
    for count in (4, 2):
        if size % count == 0:
            return {"batch.micro": size // count}, {"batch.micro": size}
    return f"batch.size {size} is not divisible by 2"


def _workers(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
    return {"machine.workers": max(2, min(4, machine.cores - 1))}, {"machine.workers": 0}


def _ema(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
    # other keys of an EMA have no effect without it, which is an error
    others = {f"ema.{name}": value for name, value in asdict(EmaConfig()).items()}
    return {**others, "ema.half_life": "1ep"}, {**others, "ema.half_life": "0"}


def _compile(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
    if machine.device == "mps":
        return "an Apple GPU does not support it"
    mode = "regional" if machine.blocks else "whole"
    return {"machine.compile": mode}, {"machine.compile": "none"}


def _on(
    key: str,
    on: Any,
    off: Any,
    *,
    needs: str = "",
    has: Callable[[Machine], bool] = lambda machine: True,
) -> Callable[[Recipe, Machine], tuple[Keys, Keys] | str]:
    """Return the ``keys`` of a technique that is one key."""

    def keys(recipe: Recipe, machine: Machine) -> tuple[Keys, Keys] | str:
        if not has(machine):
            return f"needs {needs}"
        return {key: on}, {key: off}

    return keys


def _gpu(machine: Machine) -> bool:
    return machine.device == "cuda"


_CONVOLUTIONS = attrgetter("convolutions")
_BLOCKS = attrgetter("blocks")
_PINNED = "pinned host memory and asynchronous copies to the device"
TECHNIQUES = (
    Technique("fused", "one fused kernel for the update of all parameters", _fused),
    Technique("bf16", "bfloat16 mixed precision", _on(PRECISION, "bf16", "no")),
    Technique("workers", "processes that load the data", _workers),
    Technique("pinned", _PINNED, _on("machine.pinned", True, False, needs="a GPU", has=_gpu)),
    Technique(
        "channels_last",
        "memory layout of convolutions",
        _on("machine.channels_last", True, False, needs="2-d convolutions", has=_CONVOLUTIONS),
    ),
    Technique("accumulation", "gradient accumulation over 4 micro-batches, or 2", _accumulation),
    Technique(
        "recompute",
        "activation (gradient) checkpointing of every block",
        _on("machine.recompute", "full", "none", needs="a model with blocks", has=_BLOCKS),
    ),
    Technique("ema", "EMA weights", _ema),
    Technique("clip", "clipping by the global gradient norm", _on("optimizer.clip", 1.0, 0.0)),
    Technique("logging", "a line of metrics at every step", _on("log.every", 1, 10**9)),
    Technique("compile", "torch.compile, of the blocks or the whole model", _compile),
    Technique(
        "fp16",
        "float16 mixed precision, with loss scaling",
        _on(PRECISION, "fp16", "no", needs="a GPU", has=_gpu),
    ),
)

KNOWN = {technique.name: technique for technique in TECHNIQUES}


def named(names: Sequence[str]) -> list[Technique]:
    """Return the techniques of these names. Raise BadInput for an unknown one."""
    for name in names:
        if name not in KNOWN:
            raise BadInput(f"--only {name!r} is not a technique; known: {', '.join(KNOWN)}")
    return [KNOWN[name] for name in names]
