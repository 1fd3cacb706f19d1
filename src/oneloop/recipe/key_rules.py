"""Which keys of a recipe have an effect together, and which batch.grain allows."""

import inspect
import json
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.run_keys import EvalConfig, MachineConfig
from oneloop.recipe.training_keys import OptimizerConfig

_PLAIN: dict[Any, str] = {
    int: "a whole number (int)",
    float: "a number (float)",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Duration: "a duration: steps (500), epochs (20ep), '1M samples', '2B tokens' or a share of the "
    "run "
    "(10%), never"
    " negative",
}
NEEDS = {
    "optimizer.lr_rule": "optimizer.lr_at_batch!=0",
    "schedule.final": "schedule.name!=constant",
}
NEEDS |= dict.fromkeys(("init.weights", "init.leave_out"), "init.from!=null")
NEEDS |= dict.fromkeys(("guard.spike", "guard.window"), "guard.sigma!=0")
NEEDS |= {"machine.compile_mode": "machine.compile!=none"}
"""keys that have an effect only if another key has (=), or has not (!=), one of the values after
it"""
_ENTRY = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.+)")


def wanted(kind: Any) -> str:
    """Describe ``int | Literal["auto"]`` as "a whole number (int) or auto"; empty if a type has no
    description."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(
            [", ".join(map(str, inside[:-1]))] * (len(inside) > 1) + [str(inside[-1])]
        )
    each = [wanted(one) for one in inside if one is not Ellipsis]
    if not all(each) or not each:
        return ""
    if origin in (Union, types.UnionType):
        return ", ".join(each[:-1]) + f" or {each[-1]}"
    if origin is list or (origin is tuple and Ellipsis in inside):
        return f"a list ([a,b]), each {each[0]}"
    return (
        f"{len(each)} values ([{','.join('abcdefgh'[: len(each)])}]), each {each[0]}"
        if origin is tuple
        else ""
    )


def shown(kind: Any) -> str:
    """Return ``int | Literal["auto"]`` as ``INT|{auto}``, for ``--help``."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"{{{','.join(map(str, inside))}}}"
    if origin in (Union, types.UnionType):
        return "|".join(map(shown, inside))
    if origin in (list, tuple):
        return f"[{shown(inside[0])},…]"
    return "null" if kind is type(None) else getattr(origin or kind, "__name__", str(kind)).upper()


def documented(target: Any) -> dict[str, str]:
    """Return the description of each argument from the docstrings of a class and its ``__init__``,
    or of a function."""
    found: dict[str, str] = {}
    for part in (target, getattr(target, "__init__", None)):
        lines = inspect.cleandoc(getattr(part, "__doc__", None) or "").splitlines()
        starts = [number for number, line in enumerate(lines) if line.strip() == "Args:"]
        for line in lines[starts[0] + 1 :] if starts else ():
            if entry := _ENTRY.fullmatch(line.strip()):
                found[entry[1]] = entry[2]
            elif not line.strip():
                break
            elif found and line.startswith("  "):
                found[list(found)[-1]] += f" {line.strip()}"
    return found


def without_effect(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    typed: Mapping[str, Any],
    own: Mapping[str, str],
) -> set[str]:
    """Return the keys of a recipe file that have no effect because of ``typed`` keys, which drops
    them. ``own`` are the task's conditions, as in :data:`NEEDS`. Raise BadInput if another key has
    no effect, and is not at its default."""
    needs = NEEDS | {
        f"task.{key}": re.sub(r"\w+(?=!?=)", r"task.\g<0>", needed) for key, needed in own.items()
    }
    dropped = set()
    for key, conditions in needs.items():
        for other, unlike, wanted in (
            re.split("(!?)=", condition) for condition in conditions.split()
        ):
            if not {key, other} <= values.keys():  # a subclass may lack the argument
                continue
            if values[key] == defaults[key] or (_text(values[other]) in wanted.split("|")) != bool(
                unlike
            ):
                continue
            if key in typed or other not in typed:
                why = (
                    f"{key} {_text(values[key])} has no effect with {other} {_text(values[other])}"
                )
                raise BadInput(f"{why}; remove {key}, or change {other}")
            dropped.add(key)
    return dropped


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else json.dumps(value)
    )


_OPTIMIZERS = ("adamw", "sgd", "muon")  # element-wise, or by whole matrices


def reject_inexact(
    grain: int, evaluation: EvalConfig, optimizer: OptimizerConfig, machine: MachineConfig
) -> None:
    """Raise BadInput for a key that cannot be combined with ``batch.grain``."""
    asked = f"batch.grain {grain} requires bit-identical runs on any number of processes, but"
    if evaluation.micro not in (None, grain):
        raise BadInput(
            f"eval.micro {evaluation.micro} differs from batch.grain; set it to {grain}, or "
            "remove it"
        )
    if optimizer.name not in _OPTIMIZERS:
        what = (
            "takes means over rows and columns"
            if optimizer.name == "adafactor"
            else "may not be elementwise"
        )
        raise BadInput(
            f"{asked} optimizer.name {optimizer.name} {what}; use {', '.join(_OPTIMIZERS)}"
        )
    if machine.compile == "whole":
        raise BadInput(
            f"{asked} machine.compile whole makes one graph, which DDP and FSDP2 cut; use regional"
        )
    if machine.channels_last is True:
        raise BadInput(f"{asked} machine.channels_last true does not work with FSDP2; remove it")
    if machine.cudnn_benchmark:
        raise BadInput(
            f"{asked} machine.cudnn_benchmark chooses algorithms by their time; remove it"
        )
