"""Atomic file writes, strictly valid JSON, YAML, and text for a terminal."""

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from oneloop.basics.exit_codes import BadInput

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, a quota, or a limit of this process
_MARKS = (("recipe.yaml", "environment.json"), ("MANIFEST.json", "state.json"))
"""files that a run folder holds, and those that a checkpoint holds"""


def cache_folder() -> Path:
    """Return ``$ONELOOP_CACHE``, else ``oneloop`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("ONELOOP_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oneloop"


@contextmanager
def replacing(file: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a draft that replaces ``file`` at the end; after an exception ``file`` is unchanged.

    With ``shared``, several processes may write it at the same time.

    >>> with replacing(Path("summary.json")) as draft:
    ...     draft.write_text("{}")
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft" if shared else f".{file.name}.draft")
    if file.is_dir() and not file.is_symlink():
        set_aside(file)  # else it could not be replaced
    try:
        draft.unlink(missing_ok=True)  # the write would follow a link
        draft.touch()
        # Keep the mode by umask: some libraries write files that only the owner can read.
        mode = draft.stat().st_mode & 0o777
        yield draft
        draft.chmod(mode)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(file)


def set_aside(path: Path) -> None:
    """Rename what is in the place of a file to ``bad-…``, for the user."""
    path.rename(path.with_name(f"bad-{path.name}-{time.time_ns()}"))


@contextmanager
def writing(what: object, remedy: str, *, only_full: bool = False) -> Iterator[None]:
    """Turn an error of the file system into BadInput; leave errors of buckets and others.

    Args:
        what: the path that is written, for the message, with its option or key if it has one.
        remedy: what the user can do.
        only_full: only if the disk is full: the code inside also reads other files.
    """
    try:
        yield
    except OSError as error:
        # Errors of other packages, such as those of buckets, have their own messages.
        if type(error).__module__ != "builtins" or (only_full and error.errno not in FULL):
            raise
        why = error.strerror or error
        raise BadInput(f"{what} cannot be written ({why}); {remedy}") from error


def reject_run_folder(path: Path) -> None:
    """Raise BadInput for a path to write to that is a run folder or a checkpoint, or inside one."""
    real = path.resolve()
    for folder in (real, *real.parents):
        for names in _MARKS:
            # os.path, because a folder above may not be readable
            if all(os.path.exists(folder / name) for name in names):
                raise BadInput(
                    f"{path} is in the folder of a run or a checkpoint ({folder}), which holds "
                    "only its own files; choose a path outside of it"
                )


def dumps(content: Any, **how: Any) -> str:
    """Return JSON, with NaN and Inf as strings that ``float`` can parse."""
    try:
        return json.dumps(content, allow_nan=False, **how)
    except ValueError:
        return json.dumps(_finite(content), **how)


def yaml_text(content: Mapping[str, Any]) -> str:
    """Return YAML, with the keys in their order."""
    import yaml  # the process that writes checkpoints does not need it

    return yaml.safe_dump(dict(content), sort_keys=False)


def vouched(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with a checksum of itself, which :func:`intact` checks."""
    return {**content, "checksum": _checksum(content)}


def intact(content: Mapping[str, Any]) -> bool:
    """Return whether content from :func:`vouched` is unchanged; False without a checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return bool(content.get("checksum") == _checksum(rest))


def _checksum(content: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(dumps(json.loads(dumps(content)), sort_keys=True).encode())


def _finite(content: Any) -> Any:
    """Return JSON content with NaN and Inf as strings."""
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def printable(text: object) -> str:
    """Return the text with control characters escaped (``\\x1b``), except tabs and line ends."""
    escaped = []
    for character in str(text):
        if not character.isprintable() and character not in "\n\t":
            character = character.encode("unicode_escape").decode()
        escaped.append(character)
    return "".join(escaped)


def one_line(error: object) -> str:
    """Return a message on one line."""
    return re.sub(r"\s*\n\s*", " ", str(error)).strip()


def flattened(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten one level: ``{"batch": {"size": 64}}`` to ``{"batch.size": 64}``."""
    flat: dict[str, Any] = {}
    for group, value in groups.items():
        if isinstance(value, Mapping):
            for key, inside in value.items():
                flat[f"{group}.{key}"] = inside
        else:
            flat[str(group)] = value
    return flat
