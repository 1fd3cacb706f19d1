"""A task file with the name of a module of Python, which hides that module.

This module imports nothing that such a file could hide.
"""

import os
import sys


def begin(words: list[str]) -> None:
    """Begin the run as :func:`oneloop.launch.before_imports.begin`.

    Exit with code 2 if the command line, or the recipe that it names, has such a task file: other
    imports would find it in place of Python's module.

    Args:
        words: the command line: recipe and keys.
    """
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
                f"task.name {file!r}: the file hides the module {name!r} of Python itself; give "
                "it another name"
            )
        )

    from oneloop.launch import before_imports

    before_imports.begin()


def _files(words: list[str]) -> list[str]:
    """Return the Python files that are named in a command line, or in a recipe file."""
    texts = list(words)
    for word in words[:1]:
        if word.endswith((".yaml", ".yml")) and os.path.isfile(word):
            with open(word, encoding="utf-8", errors="replace") as recipe:
                texts += recipe.read().split()
    files = []
    for text in texts:
        before, found, _ = text.strip("'\",{}").rpartition(".py")
        if found:
            files.append(f"{before.rpartition('=')[2]}.py")
    return files
