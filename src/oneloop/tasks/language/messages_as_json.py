"""Messages and tools, as lists or as JSON text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.tasks.rows.objects import Written


def read(value: Any) -> Sequence[Any]:
    """Return the messages or tools of a value: a list, its JSON text, or one message.

    A text that is other JSON, or any other value, has none.
    """
    if is_message(value):
        return [value]
    if not isinstance(value, str):
        return value if isinstance(value, list | tuple) else []
    if not value.lstrip().startswith("["):
        return []
    try:
        entries: list[Any] = json.loads(value, object_hook=Written)
    except (ValueError, RecursionError):
        return []
    return entries if all(isinstance(entry, dict) for entry in entries) else []


def is_message(value: Any) -> bool:
    """Whether a value is an object with the key of a message's role."""
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def is_missing(value: Any) -> bool:
    """Whether a value stands for nothing: null, or an empty text or list. 0 and false do not."""
    return value in (None, "", [])


def brief(value: Any) -> str:
    """Return the beginning of a value for a message."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"
