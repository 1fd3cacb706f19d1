"""Compare what identifies data, a model, a recipe or code: flat dicts of texts by name.

>>> before = texts({"samples": 64, "files": {"a.csv": "b5…"}})
>>> differences(before, texts({"samples": 60, "files": {}}))
{'samples': 'samples: 64 -> 60', 'files, a.csv': 'files, a.csv: b5… -> missing'}

Needs no torch.
"""

from collections.abc import Mapping
from typing import Any

Texts = dict[str, str | None]
"""what identifies something: texts and hashes by name; None is unknown"""
_LISTED = 5  # at most this many differences are listed
_LONG = 200  # characters of a value in a message


def texts(described: Mapping[str, Any], prefix: str = "") -> Texts:
    """Return the values of nested dicts as texts by name: {"a": {"b": 1}} as {"a, b": "1"}.

    Args:
        described: the values; None is unknown.
        prefix: the beginning of each name.
    """
    flat: Texts = {}
    for name, value in described.items():
        if isinstance(value, Mapping):
            flat |= texts(value, f"{prefix}{name}, ")
        else:
            flat[f"{prefix}{name}"] = None if value is None else str(value)
    return flat


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each entry that differs, by name. None is unknown, and equals all.

    Args:
        before: the recorded texts.
        now: the current ones.
    """
    lines = {}
    for name in {**before, **now}:
        old = before.get(name, "missing")
        new = now.get(name, "missing")
        if None not in (old, new) and old != new:
            lines[name] = f"{name}: {old!s:.{_LONG}} -> {new!s:.{_LONG}}"
    return lines


def listed(lines: Mapping[str, str]) -> str:
    """Return the first of these differences, for a message."""
    shown = [*lines.values()][:_LISTED]
    if len(lines) > _LISTED:
        shown.append(f"{len(lines) - _LISTED} more differences")
    return "; ".join(shown)
