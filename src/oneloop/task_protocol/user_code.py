"""Call a task's code: an error names its file and line."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oneloop.basics.bucket import StoreError, ends_program
from oneloop.basics.exit_codes import BadInput, Inexact, Unavailable
from oneloop.basics.extras import how_to_install


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
        if isinstance(error, ValueError | ImportError) and _by_oneloop(task, error):
            # A packaged task's message is for the user already.
            raise BadInput(f"{error}{how_to_install(error)}") from error
        raise BadInput(
            f"{named(task, member)} failed: {type(error).__name__}: {error} "
            f"({_source_line(task, error)}){how_to_install(error)}"
        ) from error


def _by_oneloop(task: Any, error: Exception) -> bool:
    """Whether the code of a packaged task raised the error."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return type(task).__module__.startswith("oneloop.") and raised.is_relative_to(
        Path(__file__).parents[1]
    )


def _source_line(task: Any, error: Exception) -> str:
    """Return file and line of the innermost frame in the task's file.

    If there is none, return those of the innermost frame.
    """
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own = inspect.getsourcefile(type(task))
    except TypeError:
        own = None
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
