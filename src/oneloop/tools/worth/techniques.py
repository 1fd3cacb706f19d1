"""Common techniques for fast training, each with the recipe keys that switch it on and off."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.schema import EmaConfig, Recipe

# a key of Accelerate, not of the recipe; set by an environment variable
PRECISION = "mixed_precision"
DEFAULT = 8  # number of techniques that are tried by default

TECHNIQUES = {
    "fused": "one fused kernel for the update of all parameters",
    "bf16": "bfloat16 mixed precision",
    "workers": "processes that load the data",
    "pinned": "pinned host memory and asynchronous copies to the device",
    "channels_last": "memory layout of convolutions",
    "accumulation": "gradient accumulation over 4 micro-batches, or 2",
    "recompute": "activation (gradient) checkpointing of every block",
    "ema": "EMA weights",
    "clip": "clipping by the global gradient norm",
    "logging": "a line of metrics at every step",
    "compile": "torch.compile, of the blocks or the whole model",
    "fp16": "float16 mixed precision, with loss scaling",
}
"""the names of all techniques, and what they are"""

Keys = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Properties of machine and model that decide which techniques can be tried."""

    device: str
    cores: int
    blocks: bool  # whether the model has blocks, for activation checkpointing and regional compile
    convolutions: bool


def check_names(names: Sequence[str]) -> None:
    """Raise BadInput if a name is not a technique."""
    for name in names:
        if name not in TECHNIQUES:
            known = ", ".join(TECHNIQUES)
            raise BadInput(f"--only {name!r} is not a technique; known: {known}")


def missing(name: str, recipe: Recipe, machine: Machine) -> str:
    """Return why a technique cannot be tried; empty: it can."""
    if name in ("pinned", "fp16") and machine.device != "cuda":
        return "needs a GPU"
    if name == "channels_last" and not machine.convolutions:
        return "needs 2-d convolutions"
    if name == "recompute" and not machine.blocks:
        return "needs a model with blocks"
    if name == "compile" and machine.device == "mps":
        return "an Apple GPU does not support it"
    if name == "accumulation" and recipe.batch.size % 2:
        return f"batch.size {recipe.batch.size} is not divisible by 2"
    if name == "fused" and recipe.optimizer.name not in _UNFUSED:
        return f"optimizer {recipe.optimizer.name} has no unfused version"
    return ""


_UNFUSED = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}


def keys(recipe: Recipe, machine: Machine) -> dict[str, tuple[Keys, Keys]]:
    """Return the keys that switch each technique on, and those that switch it off.

    They are of use for techniques of which nothing is :func:`missing`.
    """
    # Another optimizer takes the options that the recipe sets.
    optimizer = recipe.optimizer
    options = {f"optimizer.{name}": value for name, value in optimizer.options.items()}
    fused = {"optimizer.name": optimizer.name, **options}
    unfused = {"optimizer.name": _UNFUSED.get(optimizer.name), **options}

    # Other keys of an EMA have no effect without it, which is an error.
    ema = {f"ema.{name}": value for name, value in asdict(EmaConfig()).items()}
    with_ema = {**ema, "ema.half_life": "1ep"}
    without_ema = {**ema, "ema.half_life": "0"}

    size = recipe.batch.size
    smaller = size // 4 if size % 4 == 0 else size // 2
    workers = max(2, min(4, machine.cores - 1))
    compiled = "regional" if machine.blocks else "whole"
    return {
        "fused": (fused, unfused),
        "bf16": ({PRECISION: "bf16"}, {PRECISION: "no"}),
        "workers": ({"machine.workers": workers}, {"machine.workers": 0}),
        "pinned": ({"machine.pinned": True}, {"machine.pinned": False}),
        "channels_last": ({"machine.channels_last": True}, {"machine.channels_last": False}),
        "accumulation": ({"batch.micro": smaller}, {"batch.micro": size}),
        "recompute": ({"machine.recompute": "full"}, {"machine.recompute": "none"}),
        "ema": (with_ema, without_ema),
        "clip": ({"optimizer.clip": 1.0}, {"optimizer.clip": 0.0}),
        "logging": ({"log.every": 1}, {"log.every": 10**9}),
        "compile": ({"machine.compile": compiled}, {"machine.compile": "none"}),
        "fp16": ({PRECISION: "fp16"}, {PRECISION: "no"}),
    }
