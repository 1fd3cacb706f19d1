"""Whether two recipes learn the same, and what a resume makes of the difference."""

from collections.abc import Mapping
from typing import Any

from oneloop.basics.duration import Duration
from oneloop.basics.files import flattened
from oneloop.recipe.class_paths import CHOICES, same_thing

_MATHEMATICS = ("task", "seed", "duration", "init", "optimizer", "schedule", "ema", "guard")  # groups of keys
_MORE_MATHEMATICS = ("batch.size", "batch.grain", "debug.overfit")
_NOT_MATHEMATICS = ("ema.device",)
_PLACE = "task.data"
_NAMES = tuple(f"{group}.name" for group in CHOICES)


def mathematics(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved recipe that says what is learned, flattened to {"group.key": value}."""
    return {key: value for key, value in flattened(resolved).items() if _is_mathematics(key)}


def _is_mathematics(key: str) -> bool:
    group = key.partition(".")[0]
    return key in _MORE_MATHEMATICS or (group in _MATHEMATICS and key not in _NOT_MATHEMATICS)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for every key of the mathematics in which two resolved recipes differ; where the data lies is none."""
    before, after = mathematics(old), mathematics(new)
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if not _same(k, before.get(k), after.get(k))]


def _same(key: str, old: Any, new: Any) -> bool:
    """Whether two values of a key are the same; durations are, however they are written (2ep, 2epochs)."""
    if key == _PLACE:
        return bool(_without_places(old) == _without_places(new))
    if key in _NAMES:
        return same_thing(str(old), str(new))
    if old == new or key.startswith("task."):
        return bool(old == new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(key, a, b) for a, b in zip(old, new, strict=True))
    if not isinstance(old, str | int) or not isinstance(new, str | int):
        return False
    try:
        return Duration(old) == Duration(new)
    except ValueError:
        return False


def _without_places(data: Any) -> Any:
    """What ``task.data`` says beside where the data lies: shares, names and columns of a mixture."""
    if isinstance(data, str):
        return None
    if not isinstance(data, list):
        return data
    return [{k: v for k, v in item.items() if k != "data"} if isinstance(item, Mapping) else item for item in data]


def same_place(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two resolved recipes name the data by the same words. A resume compares what lies there, where it can."""
    return bool(mathematics(old).get(_PLACE) == mathematics(new).get(_PLACE))


def goes_on(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether only the duration differs, is longer, and no schedule depends on it."""
    keys = [line.partition(":")[0] for line in difference(old, new)]
    schedule = new["schedule"]
    endless = schedule["name"] in ("constant", "plateau") and "%" not in str(schedule["warmup"])
    if keys != ["duration"] or not endless:
        return False
    before, after = Duration(old["duration"]), Duration(new["duration"])
    return before.unit == after.unit and after.amount > before.amount
