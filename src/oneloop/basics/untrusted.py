"""Files from elsewhere, which anyone may have written: check them before use; delete safely.

Needs no torch.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import IO, Any

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import one_line

MOST_BYTES = 1 << 25  # of a file that is parsed as a whole
_MOST_YAML = 1 << 20  # bytes
_LONG_NUMBER = re.compile(r"\d(:\d+){20}")
_MOST_DEPTH = 250  # of containers in a JSON file
_MOST_NODES = 1 << 17  # values in a YAML file, aliases written out
_NAME_BYTES = 255  # of file systems

STEP = range(1 << 53)  # numbers of steps and samples
COUNT = range(1, 1 << 31)  # numbers of processes
HEX32 = re.compile(r"[0-9a-f]{32}")  # an xxh3-128
HEX16 = re.compile(r"[0-9a-f]{16}")  # an xxh3-64

Form = Any  # what :func:`check_form` accepts


def is_number(value: object) -> bool:
    """Return whether a value is a number that fits a tensor; NaN and infinity are numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 1 << 63


def is_number_or_none(value: object) -> bool:
    """Return whether a value is None or a number."""
    return value is None or is_number(value)


def is_amount(value: object) -> bool:
    """Return whether a value is a finite number, at least 0."""
    return is_number(value) and 0 <= value < 1 << 63  # type: ignore[operator]


def is_word(value: object) -> bool:
    """Return whether a value can be printed in a message: a number, or a printable text."""
    return is_number(value) or (isinstance(value, str) and value.isprintable())


OWNER = {"pid": is_word, "host": is_word, "since": is_word}  # of a run folder or a mirror


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


def parsed_json(content: bytes | str, form: Form = dict) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or does not have this form (:func:`check_form`).
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _reject_deep(value)
    check_form(value, form)
    return value


def _reject_deep(value: Any) -> None:
    """Raise ValueError if a value is nested so deeply that its readers could fail."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
        if not inside:
            return
        level = inside
    raise ValueError("it is nested too deeply")


def read_json(file: Path, form: Form = dict, *, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file of at most ``most`` bytes, after checking its form.

    Raises:
        ValueError: it is not JSON, too long, or does not have this form (:func:`check_form`).
        OSError: it cannot be read.
    """
    return parsed_json(read_bytes(file, most), form)


def parsed_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises ValueError if it is not YAML, or is too large with its aliases written out.
    """
    import yaml  # the process that writes checkpoints does not need it

    # PyYAML takes a minute for a number with 100,000 parts to the base of 60.
    if _LONG_NUMBER.search(text):
        raise ValueError("it has a number with too many colons (1:2:3…)")
    try:
        # libyaml is ten times as fast, and also stops at deep nesting.
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        nodes = _nodes(value, {})
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, LookupError, AttributeError, TypeError) as error:  # of wrong tags
        raise ValueError(one_line(error)) from error
    if nodes > _MOST_NODES:
        raise ValueError("it has too many values, with its aliases written out")
    _reject_deep(value)
    return value


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the dictionary in a small YAML file.

    Raises:
        ValueError: it is not YAML, not a dictionary, or too large.
        OSError: it cannot be read.
    """
    value = parsed_yaml(read_bytes(file, _MOST_YAML).decode())
    check_form(value, dict)
    return dict(value)


def _nodes(value: Any, known: dict[int, int]) -> int:
    """Return the number of values inside a value; ``known`` are those of containers, by id."""
    if isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, list):
        inside = value
    else:
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_NODES + 1  # while it is counted: it may contain itself
        known[id(value)] = 1 + sum(_nodes(item, known) for item in inside)
    return known[id(value)]


def check_form(value: Any, form: Form, where: str = "it") -> None:
    """Raise ValueError unless a parsed value has this form.

    Args:
        value: of JSON or YAML.
        form: what is expected:

            - a type, or a union of types;
            - a range: a whole number in it;
            - a pattern: a text that it matches completely;
            - a function: a value for which it returns True;
            - ``[form]``: a list; ``(form, form)``: a list of this length;
            - ``{"name": form, "other?": form}``: a dictionary with these entries, of which those
              with a ``?`` may be missing; there may be more;
            - ``{None: form}``: a dictionary with any texts as keys.
        where: the place of the value, for messages.
    """
    if isinstance(form, range):
        right = type(value) is int and value in form
    elif isinstance(form, re.Pattern):
        right = isinstance(value, str) and form.fullmatch(value) is not None
    elif isinstance(form, tuple):
        right = isinstance(value, list) and len(value) == len(form)
    elif isinstance(form, list):
        right = isinstance(value, list)
    elif isinstance(form, Mapping):
        right = isinstance(value, dict)
    elif isinstance(form, type | UnionType):
        right = isinstance(value, form)
    else:
        right = form(value)
    if not right:
        raise ValueError(f"{where} is not as expected: {value!r:.60}")

    # Check what is inside.
    if isinstance(form, tuple):
        for number, item in enumerate(value):
            check_form(item, form[number], f"{where}[{number}]")
    elif isinstance(form, list):
        for number, item in enumerate(value):
            check_form(item, form[0], f"{where}[{number}]")
    elif isinstance(form, Mapping) and None in form:
        for key, item in value.items():
            check_form(item, form[None], f"{where}[{key!r:.60}]")
    elif isinstance(form, Mapping):
        for key, inside in form.items():
            name = key.removesuffix("?")
            if name in value:
                check_form(value[name], inside, f"{where}[{name!r}]")
            elif name == key:
                raise ValueError(f"{where} has no {name!r}")


@contextmanager
def as_expected(what: str) -> Iterator[None]:
    """Raise ValueError if code that uses parsed values finds values of another kind.

    For values that only one function knows well enough to check them.

    Args:
        what: the values, for the message.
    """
    try:
        yield
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        kind = type(error).__name__
        raise ValueError(f"{what} has values that are not as expected ({kind}: {error})") from error


def check_kind(value: Any, known: Any, where: str) -> None:
    """Raise ValueError if a parsed value is of another kind than a known one of its place.

    Kinds are numbers, texts, lists and dictionaries. None fits any kind.
    """
    for kind in (bool, int | float, str, list | tuple, Mapping):
        if isinstance(known, kind):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{where} is not as expected: {value!r:.60}")
            return


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
