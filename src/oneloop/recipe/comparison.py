"""Compare the training configuration of two recipes, as a resume does."""

from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.basics.duration import Duration
from oneloop.basics.files import flattened
from oneloop.recipe.class_paths import CHOICES, same_object

_TRAINING_GROUPS = (
    "task",
    "seed",
    "duration",
    "init",
    "data",
    "optimizer",
    "schedule",
    "ema",
    "guard",
)
_TRAINING_KEYS = ("batch.size", "batch.grain", "debug.overfit")
_OTHER_KEYS = ("ema.device", "task.store")
_DATA = "task.data"
_NAMES = tuple(f"{group}.name" for group in CHOICES)


def training_configuration(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a resolved recipe that decide what is trained, as {"group.key": value}."""
    return {key: value for key, value in flattened(resolved).items() if _is_training_key(key)}


def _is_training_key(key: str) -> bool:
    group = key.partition(".")[0]
    return key in _TRAINING_KEYS or (group in _TRAINING_GROUPS and key not in _OTHER_KEYS)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per key of the training configuration that differs.

    The path of the data is not compared.
    """
    before = training_configuration(old)
    after = training_configuration(new)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        was = before.get(key)
        now = after.get(key)
        if not _same(key, was, now):
            lines.append(f"{key}: {was!r} -> {now!r}")
    return lines


def _same(key: str, old: Any, new: Any) -> bool:
    """Return whether two values of a key are equal.

    Equal durations may be written differently (2ep, 2epochs).
    """
    # Names and paths may be written in several ways.
    if key == _DATA:
        return bool(_without_paths(old) == _without_paths(new))
    if key in _NAMES:
        return same_object(str(old), str(new))
    if key == "ema.ramp" and [old, new] in ([None, 0.05], [0.05, None]):  # null is 0.05
        return True
    if old == new or key.startswith("task."):
        return bool(old == new)
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return False
        return all(_same(key, a, b) for a, b in zip(old, new, strict=True))

    # Compare durations. Other values are no durations, and differ.
    if not isinstance(old, str | int) or not isinstance(new, str | int):
        return False
    try:
        return Duration(old) == Duration(new)
    except ValueError:
        return False


def _without_paths(data: Any) -> Any:
    """Return ``task.data`` without paths: shares, names and columns of a mixture."""
    if isinstance(data, str):
        return None
    if not isinstance(data, list):
        return data
    kept = []
    for item in data:
        if isinstance(item, Mapping):
            item = {key: value for key, value in item.items() if key != "data"}
        kept.append(item)
    return kept


def same_data_path(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two resolved recipes have the same ``task.data``, paths included."""
    return bool(training_configuration(old).get(_DATA) == training_configuration(new).get(_DATA))


_ENDLESS = ("constant", "plateau", "step", "exponential")  # schedules without an end


def _is_endless(schedule: Mapping[str, Any]) -> bool:
    """Return whether a schedule (its resolved keys) is the same for runs of any duration."""
    has_end = schedule["name"] not in _ENDLESS and schedule.get("length") is None
    return not has_end and not _has_shares(schedule)


def _has_shares(group: Mapping[str, Any]) -> bool:
    """Return whether a duration in this group of keys is a share of the run."""
    return any("%" in str(value) for value in group.values())


def only_extends(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether only the duration differs, and may be extended.

    The new one must be longer, and schedule and EMA must not depend on it.
    """
    keys = [line.partition(":")[0] for line in difference(old, new)]
    if keys != ["duration"] or not _is_endless(new["schedule"]):
        return False
    if _has_shares(new["ema"]):
        return False
    before, after = Duration(old["duration"]), Duration(new["duration"])
    return before.unit == after.unit and after.amount > before.amount


def what_to_do(changed: Sequence[str]) -> str:
    """Return what a user can do about lines of :func:`difference`."""
    advice = (
        "choose another run.dir, use the same recipe, or continue with --run.accept_changes true"
    )
    if [line.partition(":")[0] for line in changed] == ["duration"]:
        advice += (
            ". A longer duration needs no such key if schedule and EMA do not depend on it "
            "(schedule.name constant)"
        )
    return advice
