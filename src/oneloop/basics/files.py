"""Files that are written whole or not at all, JSON that any reader accepts, and text for a terminal."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest


@contextmanager
def replacing(file: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a draft that replaces ``file`` at the end; after an exception ``file`` is unchanged. With ``shared``,
    several processes may write it at the same time.

    >>> with replacing(Path("summary.json")) as draft:
    ...     draft.write_text("{}")
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft" if shared else f".{file.name}.draft")
    try:
        if draft.is_symlink():
            draft.unlink()  # it would be written to where it leads
        draft.touch()
        mode = draft.stat().st_mode & 0o777  # as umask says: some libraries make theirs readable to nobody else
        yield draft
        draft.chmod(mode)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(file)


_plain = json.JSONEncoder(allow_nan=False).encode  # kept: json.dumps makes one at every call


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


def printable(text: object) -> str:
    """The text with control characters written out (``\\x1b``), so that it moves no cursor; line ends stay."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in shown)


def one_line(error: object) -> str:
    """A message of several lines on one."""
    return re.sub(r"\s*\n\s*", " ", str(error)).strip()


def flattened(groups: Mapping[str, Any]) -> dict[str, Any]:
    """``{"seed": 0, "batch": {"size": 64}}`` as ``{"seed": 0, "batch.size": 64}``; one level, no further."""
    flat: dict[str, Any] = {}
    for group, value in groups.items():
        if isinstance(value, Mapping):
            flat |= {f"{group}.{key}": inside for key, inside in value.items()}
        else:
            flat[str(group)] = value
    return flat
