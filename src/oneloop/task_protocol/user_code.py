"""Call a task's code: an error names its file and line."""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from oneloop.basics.bucket import StoreError, ends_program
from oneloop.basics.content_hash import content_hash
from oneloop.basics.exit_codes import BadInput, Inexact, Unavailable
from oneloop.basics.extras import how_to_install

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def named(task: Any, member: str) -> str:
    """Return where a task's member is defined: ``my_task.py:23: Sines.loss``.

    If it is defined elsewhere, return the line of the class.
    """
    kind = type(task)
    code = getattr(getattr(kind, member, None), "__code__", None)
    try:
        file = inspect.getsourcefile(kind)
        if code and code.co_filename == file:
            line = code.co_firstlineno
        else:
            _, line = inspect.getsourcelines(kind)
        return f"{file}:{line}: {kind.__name__}.{member}"
    except (TypeError, OSError):  # a class that was typed into an interpreter
        return f"{kind.__name__}.{member}"


def theirs(task: Any, member: str, call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, which runs the task's code.

    Out-of-memory errors are raised unchanged.

    Args:
        task: the task.
        member: name of the method that is called.
        call: calls it.

    Raises:
        BadInput: the call raised an exception; the message has its file and line.
        ValueError: a store of remote data denies access, or lacks an object.
        Unavailable: it cannot be reached now.
    """
    try:
        return call()
    except (BadInput, Inexact, Unavailable, torch.OutOfMemoryError, MemoryError):
        raise
    except StoreError as error:
        # Data are read over a network, for which the task's code is not the cause.
        raise ends_program(error) from error
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):
            raise
        packaged = type(task).__module__.startswith("oneloop.") and _by_oneloop(error)
        if packaged and isinstance(error, ValueError | ImportError):
            # A packaged task's message is for the user already.
            raise BadInput(f"{error}{how_to_install(error)}") from error
        raise BadInput(
            f"{named(task, member)} failed: {type(error).__name__}: {error} "
            f"({_position(error)}){how_to_install(error)}"
        ) from error


def where(error: BaseException) -> str:
    """Return the position of an error in the user's code, so that a bug is not taken for bad input.

    It is the innermost line outside of libraries and oneloop; empty if oneloop raised the error.
    """
    return "" if _by_oneloop(error) else f" ({_position(error)})"


def is_library(file: str) -> bool:
    """Return whether a source file is part of Python or of an installed package."""
    return file.startswith(_LIBRARIES) or "-packages/" in file


def sources() -> dict[str, str]:
    """Return a hash of the source of each imported module that is not installed."""
    hashes = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or is_library(file):
            continue
        with suppress(OSError):
            hashes[name] = content_hash(Path(file).read_bytes())
    return hashes


def source_hash(kind: Any) -> str:
    """Return a hash of the file of a class; of a class in a notebook, of its functions' sources."""
    with suppress(TypeError, OSError):
        return content_hash(Path(str(inspect.getsourcefile(kind))).read_bytes())
    with suppress(TypeError, OSError):
        functions = filter(inspect.isfunction, vars(kind).values())
        return content_hash([*map(inspect.getsource, functions)])
    return "unknown"


def _by_oneloop(error: BaseException) -> bool:
    """Whether oneloop's own code raised the error."""
    return _is_ours(traceback.extract_tb(error.__traceback__)[-1].filename)


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])


def _position(error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's code; else of the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [f for f in frames if not (_is_ours(f.filename) or is_library(f.filename))]
    frame = (of_user or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
