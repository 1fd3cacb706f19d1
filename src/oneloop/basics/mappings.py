"""Nested settings under dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flattened(groups: Mapping[str, Any]) -> dict[str, Any]:
    """``{"seed": 0, "batch": {"size": 64}}`` as ``{"seed": 0, "batch.size": 64}``; one level, no further."""
    flat: dict[str, Any] = {}
    for group, value in groups.items():
        if isinstance(value, Mapping):
            flat |= {f"{group}.{key}": inside for key, inside in value.items()}
        else:
            flat[str(group)] = value
    return flat
