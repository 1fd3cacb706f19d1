"""Which keys of a recipe have an effect together, and which batch.grain allows."""

import json
import re
import types
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Union, get_args, get_origin

from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.run_keys import EvalConfig, MachineConfig
from oneloop.recipe.training_keys import OptimizerConfig

_PLAIN = {
    "INT": "a whole number (int)",
    "FLOAT": "a number (float)",
    "BOOL": "true or false",
    "STR": "text",
    "DURATION": "a duration: steps (500), epochs (20ep), '1M samples', '2B tokens' or a share of "
    "the run (10%), never negative",
}
"""types as :func:`shown` writes them, and their descriptions"""
_NO_WARMUP = "schedule.name!=*.OneCycleLR|*.CyclicLR|*_with_warmup"  # these have their own
NEEDS = {
    "schedule.final": "schedule.name!=constant|plateau|torch.*|transformers.*",
    "schedule.length": "schedule.name!=constant|plateau",
    "ema.start": "ema.decay!=0",
    "ema.warmup_power": "ema.decay!=0",
    "schedule.warmup": _NO_WARMUP,
    "schedule.warmup_start": f"{_NO_WARMUP} schedule.warmup!=0",
    "schedule.warmup_offset": f"{_NO_WARMUP} schedule.warmup!=0",
    "init.weights": "init.from!=null",
    "init.leave_out": "init.from!=null",
    "stop.patience": "eval.every!=0",
    "machine.compile_mode": "machine.compile!=none",
}
"""keys that have an effect only if another key has (=), or has not (!=), one of the values after
it, in which * stands for any text"""
_NOTHING = re.compile(r"0+(\.0*)?\s*([KMB]?\s*[a-z]+|%)?")


def shown(kind: Any) -> str:
    """Return ``int | Literal["auto"]`` as ``INT|{auto}``, for ``--help``."""
    origin = get_origin(kind)
    inside = get_args(kind)
    if origin is Literal:
        return f"{{{','.join(map(str, inside))}}}"
    if origin in (Union, types.UnionType):
        return "|".join(map(shown, inside))
    if origin is tuple and Ellipsis not in inside:
        return f"[{','.join(map(shown, inside))}]"
    if origin in (list, tuple):
        return f"[{shown(inside[0])},…]"
    if kind is type(None):
        return "null"
    return str(getattr(origin or kind, "__name__", str(kind)).upper())


def described(kind: Any) -> str:
    """Return ``int | Literal["auto"]`` as "a whole number (int) or {auto}", for messages.

    Return an empty text if a type has no description.
    """
    text = shown(kind)
    if not set(re.findall("[A-Z]+", text)) <= _PLAIN.keys():
        return ""
    return re.sub("[A-Z]+", lambda name: _PLAIN[name[0]], text.replace("|", " or "))


def without_effect(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    typed: Mapping[str, Any],
    own: Mapping[str, str],
) -> set[str]:
    """Return the keys of a recipe file that have no effect because of ``typed`` keys.

    Args:
        values: all keys and their values.
        defaults: the value of each key if nobody gives it.
        typed: the keys of the command line.
        own: the task's conditions, as in :data:`NEEDS`, without ``task.``.

    Raises:
        BadInput: another key has no effect, and is not at its default.
    """
    # Let the task's conditions name its own arguments.
    needs = dict(NEEDS)
    for key, conditions in own.items():
        needs[f"task.{key}"] = re.sub(r"\w+(?=!?=)", r"task.\g<0>", conditions)

    # Find keys that are not at their default, and of which a condition is not met.
    dropped = set()
    for key, conditions in needs.items():
        for condition in conditions.split():
            other, unlike, allowed = re.split("(!?)=", condition)
            if not {key, other} <= values.keys():  # a subclass may lack the argument
                continue
            if str(values[key]) == str(defaults[key]):  # a default may be a Duration
                continue
            shown_value = _text(values[other])
            fits = any(fnmatchcase(shown_value, value) for value in allowed.split("|"))
            has_effect = fits != bool(unlike)
            if has_effect:
                continue
            if key in typed or other not in typed:
                raise BadInput(
                    f"{key} {_text(values[key])} has no effect with {other} {shown_value}; "
                    f"remove {key}, or change {other}"
                )
            dropped.add(key)
    return dropped


def _text(value: Any) -> str:
    """Return a value as in a condition; a duration of nothing is 0, however it is written."""
    if isinstance(value, list) and value and all(_text(one) == "0" for one in value):
        return "0"
    if isinstance(value, str):
        return "0" if _NOTHING.fullmatch(value) else value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)


_CLASSES = {"step": "StepLR", "exponential": "ExponentialLR", "onecycle": "OneCycleLR"}
_ARGUMENTS = {"every": "step_size", "milestones": "milestones", "factor": "gamma"}


def instead_of_schedule(keys: Mapping[str, Any]) -> str:
    """Return what to set instead of a schedule that is a class of torch, or an empty text."""
    name = keys.get("schedule.name")
    if name not in _CLASSES:
        return ""
    kind = "MultiStepLR" if "schedule.milestones" in keys else _CLASSES[name]
    arguments = {}
    for key, argument in _ARGUMENTS.items():
        if f"schedule.{key}" in keys:
            arguments[argument] = keys[f"schedule.{key}"]

    # The factor of an exponential schedule becomes that of one step.
    if name == "exponential":
        every = str(arguments.pop("step_size", "1ep"))
        factor = arguments.get("gamma", 0.95)
        arguments["gamma"] = f"{factor} ** (1 / steps of {every})"
        if every.isdecimal():
            arguments["gamma"] = float(factor) ** (1 / int(every))
    words = [f", schedule.{argument} {value}" for argument, value in arguments.items()]
    return f"set schedule.name torch.optim.lr_scheduler.{kind}{''.join(words)}"


_OPTIMIZERS = ("adamw", "sgd", "muon")  # element-wise, or by whole matrices


def reject_inexact(
    grain: int, evaluation: EvalConfig, optimizer: OptimizerConfig, machine: MachineConfig
) -> None:
    """Raise BadInput for a key that cannot be combined with ``batch.grain``."""
    # An evaluation in other micro-batches would round differently.
    if evaluation.micro not in (None, grain):
        raise BadInput(
            f"eval.micro {evaluation.micro} differs from batch.grain; set it to {grain}, or "
            "remove it"
        )

    # An update must not depend on how parameters are sharded.
    if optimizer.name not in _OPTIMIZERS:
        raise BadInput(
            f"batch.grain {grain} requires bit-identical runs on any number of processes, but "
            f"optimizer.name {optimizer.name} may not be elementwise; use {', '.join(_OPTIMIZERS)}"
        )

    # Each layout must run the same kernels.
    if machine.compile == "whole":
        raise BadInput(
            f"batch.grain {grain} requires bit-identical runs on any number of processes, but "
            "machine.compile whole makes one graph, which DDP and FSDP2 cut; use regional"
        )
    if machine.channels_last is True:
        raise BadInput(
            f"batch.grain {grain} requires bit-identical runs on any number of processes, but "
            "machine.channels_last true does not work with FSDP2; remove it"
        )
    if machine.cudnn_benchmark:
        raise BadInput(
            f"batch.grain {grain} requires bit-identical runs on any number of processes, but "
            "machine.cudnn_benchmark chooses algorithms by their time; remove it"
        )
