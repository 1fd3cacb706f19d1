"""A task file with the name of a module of Python, which hides that module.

This module imports nothing that such a file could hide (itertools is built in).
"""

import os
import sys
from itertools import pairwise

from oneloop.basics.system import exit_if_not_supported

# keys whose value may be FILE.py:Name; in a recipe file, the name is below its group
_KEYS = ("task", "task.name", "optimizer.name", "schedule.name", "name")


def begin(words: list[str]) -> None:
    """Begin the run as :func:`oneloop.launch.before_imports.begin`.

    Exit with code 2 if the system is not supported, or if the command line, or the recipe that it
    names, has such a task file: other imports would find it in place of Python's module.

    Args:
        words: the command line: recipe and keys.
    """
    exit_if_not_supported()
    for file in _files(words):
        name = os.path.basename(file).removesuffix(".py")
        folder = os.path.dirname(os.path.abspath(file))
        if name not in sys.stdlib_module_names or not os.path.isfile(file):
            continue
        sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]
        sys.modules.pop(name, None)
        from oneloop.basics.exit_codes import BadInput
        from oneloop.launch.before_imports import reject

        reject(
            BadInput(
                f"the file {file!r} hides the module {name!r} of Python itself; give "
                "it another name"
            )
        )

    from oneloop.launch import before_imports

    before_imports.begin()


def _files(words: list[str]) -> list[str]:
    """Return the Python files in which a command line, or its recipe file, names a class."""
    names = words[:1]
    for key, value in pairwise(words):
        if key.removeprefix("--") in _KEYS:
            names.append(value)
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        if key in _KEYS:
            names.append(value)

    # Read the recipe without a parser, which would import other modules.
    recipe = words[0] if words else ""
    if recipe.endswith((".yaml", ".yml")) and os.path.isfile(recipe):
        with open(recipe, encoding="utf-8", errors="replace") as stream:
            texts = stream.read().replace("{", " ").split()
        for key, value in pairwise(texts):
            if key.rstrip(":") in _KEYS:
                names.append(value.strip("'\",}"))

    files = []
    for name in names:
        file = name.rpartition(":")[0] if ".py:" in name else name
        if file.endswith(".py"):
            files.append(file)
    return files
