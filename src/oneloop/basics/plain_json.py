"""Figures as JSON that any reader takes: NaN and Inf, which JSON has not, are written as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_plain = json.JSONEncoder(allow_nan=False).encode
"""kept: json.dumps makes one at every call"""


def dumps(content: Any, **how: Any) -> str:
    """As :func:`json.dumps`; ``float`` reads what is written for NaN and Inf."""
    try:
        return json.dumps(content, allow_nan=False, **how) if how else _plain(content)
    except ValueError:
        return json.dumps(_finite(content), **how)


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
