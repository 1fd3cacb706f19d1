"""What a key takes, in words: for messages about values that do not fit, and for what --help says of own classes."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

from oneloop.basics.duration import Duration

_PLAIN: dict[Any, str] = {
    int: "a whole number (int)",
    float: "a number (float)",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Duration: "a duration: steps (500), epochs (20ep), '1M samples', '2B tokens' or a share of the run (10%), never"
    " negative",
}
_ENTRY = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.+)")


def wanted(kind: Any) -> str:
    """``int | Literal["auto"]`` as "a whole number (int) or auto"; empty for a type without words."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join([", ".join(map(str, inside[:-1]))] * (len(inside) > 1) + [str(inside[-1])])
    each = [wanted(one) for one in inside if one is not Ellipsis]
    if not all(each) or not each:
        return ""
    if origin in (Union, types.UnionType):
        return ", ".join(each[:-1]) + f" or {each[-1]}"
    if origin is list or (origin is tuple and Ellipsis in inside):
        return f"a list ([a,b]), each {each[0]}"
    if origin is tuple:
        return f"{len(each)} values ([{','.join('abcdefgh'[: len(each)])}]), each {each[0]}"
    return ""


def documented(target: Any) -> dict[str, str]:
    """What the docstrings of a class and its ``__init__``, or of a function, say of each argument, however indented."""
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
