"""Fingerprints: what identifies data, a model or code, as hashes and texts by name.

>>> differences({"samples": 64, "files": {"a.csv": "b5…"}}, {"samples": 60, "files": {}})
['samples: 64 -> 60', 'files, a.csv is missing']
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

_LISTED = 5  # at most this many differences are listed
_ABSENT = "missing"


def fingerprint_of(dataset: Any) -> dict[str, Any] | None:
    """Return the result of a data set's ``fingerprint()`` as a dict; None if it has none."""
    method = getattr(dataset, "fingerprint", None)
    fingerprint = method() if callable(method) else None
    if fingerprint is None:
        return None
    if isinstance(fingerprint, Mapping):
        return dict(fingerprint)
    return {"fingerprint": str(fingerprint)}


def content_checksum(described: Any) -> str:
    """Return a hash of a fingerprint, or of its entry ``files``."""
    return xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference between two fingerprints. None is unknown, and equals all.

    Args:
        before: the recorded fingerprint.
        now: the current one.
    """
    lines = []
    for name, old, new in _different(before, now):
        if old is _ABSENT:
            lines.append(f"{name} is new")
        elif new is _ABSENT:
            lines.append(f"{name} is missing")
        else:
            lines.append(f"{name}: {old} -> {new}")
    more = len(lines) - _LISTED
    return lines if more < 1 else [*lines[:_LISTED], f"{more} more differences"]


def rank_difference(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return how the fingerprint of a rank differs from that of rank 0; empty if none does.

    Args:
        reports: fingerprints by rank.
    """
    for rank, report in enumerate(reports):
        for name, first, other in _different(reports[0], report):
            return f"{name} is {first} on rank 0, and {other} on rank {rank}"
    return ""


def _different(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each entry that differs."""
    old = _flat(before)
    new = _flat(now)
    for name in {**old, **new}:
        pair = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if None not in pair and pair[0] != pair[1]:
            yield name, *pair


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of nested dicts by their names: {"a": {"b": 1}} as {"a, b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in described.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}, {inner}": inside for inner, inside in _flat(value).items()}
        else:
            flat[name] = value
    return flat
