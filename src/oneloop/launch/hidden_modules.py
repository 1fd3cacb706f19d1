"""A task file with the name of a module of Python, which hides that module.

This module imports nothing that such a file could hide.
"""

import os
import sys

from oneloop.basics.system import exit_if_not_supported


def begin(words: list[str]) -> None:
    """Begin the run as :func:`oneloop.launch.before_imports.begin`.

    Exit with code 2 if the system is not supported, or if the command line has such a task file
    (FILE.py:Name): other imports would find it in place of Python's module.

    Args:
        words: the command line: recipe and keys.
    """
    exit_if_not_supported()
    for word in words:
        file = word.rpartition("=")[2].partition(":")[0]
        name = os.path.basename(file).removesuffix(".py")
        folder = os.path.dirname(os.path.abspath(file))
        hides = file.endswith(".py") and name in sys.stdlib_module_names
        if not hides or not os.path.isfile(file):
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
