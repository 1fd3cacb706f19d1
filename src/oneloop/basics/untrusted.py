"""Files from elsewhere, which anyone may have written: check them before use; delete safely.

Needs no torch.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import one_line

MOST_BYTES = 1 << 25  # of a file that is parsed as a whole
_MOST_DEPTH = 250  # of containers in a JSON file
_NAME_BYTES = 255  # of file systems
_UNEXPECTED = (
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SafetensorError,
)
"""errors of code that finds other values in a file than it expects"""


@contextmanager
def damaged(what: object) -> Iterator[None]:
    """Raise ValueError if a file has other values than the code expects that uses them.

    So this code need not check each value.

    Args:
        what: the file, or what it describes, for the message.
    """
    try:
        yield
    except _UNEXPECTED as error:
        kind = type(error).__name__
        raise ValueError(
            f"{what} is damaged: its values are not as expected ({kind}: {one_line(error)})"
        ) from error


def is_plain(name: object, parts: int = 1) -> bool:
    """Return whether a value is a relative path of plain names.

    Such a path cannot lead out of the folder to which it is relative.

    Args:
        name: from a file.
        parts: most names in it; 2 allows ``1_Pooling/config.json``.
    """
    if not isinstance(name, str) or name.count("/") >= parts:
        return False
    for part in name.split("/"):
        if part in ("", ".", "..") or "\0" in part:
            return False
        try:
            encoded = os.fsencode(part)
        except UnicodeEncodeError:  # a lone surrogate
            return False
        if len(encoded) > _NAME_BYTES:
            return False
    return True


def opened(file: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        BadInput: it is a pipe, a device or a folder: reading it may never end.
        OSError: it cannot be opened.
    """
    if file.exists() and not file.is_file():
        raise BadInput(f"{file} is not a regular file; remove it, or restore the file")
    return file.open("rb")


def read_bytes(file: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a small regular file.

    Raises:
        ValueError: it is longer than ``most`` bytes, or not a regular file.
        OSError: it cannot be read.
    """
    with opened(file) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{file.name} is longer than {most:,} bytes")
    return content


def parsed_json(content: bytes | str, kind: type = dict) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, nested too deeply, or of another kind.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _reject_deep(value)
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__}, found {value!r:.60}")
    return value


def _reject_deep(value: Any) -> None:
    """Raise ValueError if a value is nested so deeply that its readers could fail."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        inside: list[Any] = []
        for item in {id(item): item for item in level}.values():  # aliases of YAML repeat items
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
        if not inside:
            return
        level = inside
    raise ValueError("it is nested too deeply")


def read_json(file: Path, kind: type = dict, *, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file of at most ``most`` bytes.

    Raises:
        ValueError: it is not JSON, too long, nested too deeply, or of another kind.
        OSError: it cannot be read.
    """
    return parsed_json(read_bytes(file, most), kind)


def parsed_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises ValueError if it is not YAML, or nested too deeply.
    """
    import yaml  # the process that writes checkpoints does not need it

    try:
        # libyaml is ten times as fast, and also stops at deep nesting.
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, LookupError, AttributeError, TypeError) as error:  # of wrong tags
        raise ValueError(one_line(error)) from error
    _reject_deep(value)
    return value


class NotDeleted(Unavailable):
    """A file or a folder cannot be deleted."""


def delete(path: Path, *, inside: Path) -> None:
    """Delete a file, a link or a folder, if it exists.

    Args:
        path: to delete.
        inside: the folder that must contain it directly, also if it is reached by a link.

    Raises:
        ValueError: the path is not directly in this folder; nothing is deleted.
        NotDeleted: it cannot be deleted, or not completely.
    """
    if path.name in ("", "..") or path.parent.resolve() != inside.resolve():
        raise ValueError(f"nothing was deleted: {path} is not directly in {inside}")
    try:
        # Try again what another process deletes at the same time.
        while path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NotDeleted(
            f"{path} cannot be deleted ({error.strerror}: {error.filename}); delete it, or make it "
            "writable"
        ) from error
