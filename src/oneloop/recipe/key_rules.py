"""Which values a key of a recipe can have, and which keys have an effect together."""

import json
import math
import re
import sys
import types
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Union, get_args, get_origin

from oneloop.basics.exit_codes import BadInput

_PLAIN = {
    "INT": "a whole number (int)",
    "FLOAT": "a number (float)",
    "BOOL": "true or false",
    "STR": "text",
    "DURATION": "a duration: steps (500), epochs (20ep), '1M samples', '2B tokens' or a share of "
    "the run (10%), never negative",
}
"""types as :func:`shown` writes them, and their descriptions"""
LEAST = {
    0: "optimizer.lr optimizer.weight_decay optimizer.clip optimizer.lr_at_batch schedule.final "
    "schedule.warmup_start schedule.warmup_offset ema.decay ema.warmup_power guard.sigma "
    "machine.workers machine.patience eval.samples eval.generate stop.patience debug.overfit",
    1e-6: "optimizer.layer_decay",
    1: "batch.size batch.micro batch.grain ema.every guard.patience eval.micro save.keep",
}
"""the smallest values of keys"""
MOST = {
    "optimizer.layer_decay": 1,
    "schedule.warmup_start": 1,
    "schedule.warmup_offset": 1_000_000,
    "ema.decay": 1 - 1e-9,
    "machine.workers": 512,
    "machine.patience": 1_000_000,
}
"""the largest values of keys that have one"""
_NO_WARMUP = "schedule.name!=*.OneCycleLR|*.CyclicLR|*_with_warmup"  # these have their own
NEEDS = {
    "schedule.final": "schedule.name!=constant|plateau|torch.*|transformers.*",
    "schedule.length": "schedule.name!=constant|plateau",
    "schedule.warmup": _NO_WARMUP,
    "schedule.warmup_start": f"{_NO_WARMUP} schedule.warmup!=0",
    "schedule.warmup_offset": f"{_NO_WARMUP} schedule.warmup!=0",
    "ema.start": "ema.decay!=0",
    "ema.warmup_power": "ema.decay!=0",
    "ema.every": "ema.half_life!=0/ema.decay!=0/ema.power!=[]",
    "ema.buffers": "ema.half_life!=0/ema.decay!=0/ema.power!=[]",
    "ema.device": "ema.half_life!=0/ema.decay!=0/ema.power!=[]",
    "batch.micro": "batch.grain=null",
    "eval.micro": "batch.grain=null",
    "init.weights": "init.from!=null",
    "init.leave_out": "init.from!=null",
    "stop.patience": "eval.every!=0",
    "machine.compile_mode": "machine.compile!=none",
}
"""keys that have an effect only if another key has (=), or has not (!=), one of the values after
it; / separates conditions of which one is enough, and * stands for any text"""
EXCLUDES = {
    "batch.grain": "optimizer.name=adamw|sgd|muon machine.compile!=whole "
    "machine.channels_last!=true machine.cudnn_benchmark!=true",
    "ema.decay": "ema.half_life=0",
    "ema.every": "ema.start=null ema.warmup_power=0",
    "ema.device": "ema.buffers=false",
    "save.final": "save.best=true",
    "save.mirror": "run.dir!=??*:*",  # an address
    "schedule.warmup_start": "schedule.warmup_offset=0",
}
"""conditions as in :data:`NEEDS` of keys that otherwise cannot be used. With batch.grain, runs are
bit-identical on any number of processes: each layout must run the same kernels, and an update must
not depend on how parameters are sharded"""
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
    if origin in (list, tuple, Sequence):
        return f"[{shown(inside[0])},…]"
    if kind is type(None):
        return "null"
    return str(getattr(origin or kind, "__name__", str(kind)).upper())


def described(kind: Any) -> str:
    """Return ``int | Literal["auto"]`` as "a whole number (int) or {auto}", for messages.

    Return an empty text if a type has no description.
    """
    text = shown(kind).replace("|", " or ")
    try:
        return re.sub("[A-Z]+", lambda name: _PLAIN[name[0]], text)
    except KeyError:
        return ""


def _limits(key: str, least: float) -> str:
    return f"from {least} to {MOST[key]}" if key in MOST else f"at least {least}"


def reject_out_of_range(values: Mapping[str, Any]) -> None:
    """Raise BadInput for a number that a key cannot have.

    Args:
        values: all keys and their values.
    """
    for least, keys in LEAST.items():
        for key in keys.split():
            value = values[key]
            most = MOST.get(key, sys.float_info.max)
            if isinstance(value, int | float) and not least <= value <= most:
                raise BadInput(f"{key} must be {_limits(key, least)}, got {value}")

    # The micro-batches of batch.grain are a power of two.
    size = values["batch.size"]
    grain = values["batch.grain"] or size
    nearest = grain << max(0, round(math.log2(size / grain)))
    if size != nearest:
        raise BadInput(
            f"batch.size {size} is {size / grain:.4g} times batch.grain {grain}, and batch.grain "
            f"requires a power of two; nearest size: {nearest}"
        )


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
        BadInput: another key has no effect, or is excluded, and is not at its default.
    """
    # Let the task's conditions name its own arguments.
    needs = dict(NEEDS)
    for key, conditions in own.items():
        needs[f"task.{key}"] = re.sub(r"\w+(?=!?=)", r"task.\g<0>", conditions)

    # Find keys that are not at their default, and of which a condition is not met.
    dropped = set()
    for table, wrong in ((needs, "has no effect"), (EXCLUDES, "cannot be combined")):
        for key, conditions in table.items():
            # A subclass may lack the argument, and a default may be a Duration.
            if key not in values or str(values[key]) == str(defaults[key]):
                continue
            for condition in conditions.split():
                other = _unmet(condition, values)
                if not other:
                    continue
                if table is EXCLUDES or key in typed or other not in typed:
                    raise BadInput(
                        f"{key} {_text(values[key])} {wrong} with {other} {_text(values[other])}; "
                        f"remove {key}, or change {other}"
                    )
                dropped.add(key)
    return dropped


def _unmet(condition: str, values: Mapping[str, Any]) -> str:
    """Return the key for which a condition is not met, or an empty text."""
    unmet = ""
    for alternative in condition.split("/"):
        key, unlike, allowed = re.split("(!?)=", alternative)
        if key not in values:
            return ""
        value = _text(values[key])
        fits = any(fnmatchcase(value, pattern) for pattern in allowed.split("|"))
        if fits != bool(unlike):
            return ""
        unmet = unmet or key
    return unmet


def _text(value: Any) -> str:
    """Return a value as in a condition; a duration of nothing is 0, however it is written."""
    if isinstance(value, str):
        return "0" if _NOTHING.fullmatch(value) else value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)
