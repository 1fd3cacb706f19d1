"""Figures as JSON that any reader takes: NaN and Inf, which JSON has not, are written as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_hexdigest

_plain = json.JSONEncoder(allow_nan=False).encode
"""kept: json.dumps makes one at every call"""


def dumps(content: Any, **how: Any) -> str:
    """As :func:`json.dumps`; ``float`` reads what is written for NaN and Inf."""
    try:
        return json.dumps(content, allow_nan=False, **how) if how else _plain(content)
    except ValueError:
        return json.dumps(_finite(content), **how)


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a checksum of itself, for a file that is read again: see :func:`intact`."""
    return {**content, "checksum": _checksum(content)}


def intact(content: Mapping[str, Any]) -> bool:
    """Whether what :func:`vouched` was given is unchanged; without a checksum it is not."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return bool(content.get("checksum") == _checksum(rest))


def _checksum(content: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(dumps(json.loads(dumps(content)), sort_keys=True).encode())


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
