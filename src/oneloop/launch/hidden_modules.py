"""A task file with the name of a module of Python, which hides that module.

This module imports nothing that such a file could hide.
"""

import os
import sys

from oneloop.basics.system import exit_if_not_supported


def begin(words: list[str]) -> None:
    """Begin the run as :func:`oneloop.launch.before_imports.begin`.

    Exit with code 2 if the system is not supported, or as :func:`reject` does.

    Args:
        words: the command line: recipe and keys.
    """
    exit_if_not_supported()
    reject(words)
    from oneloop.launch import before_imports

    before_imports.begin()


def reject(words: list[str]) -> None:
    """Exit with code 2 if the command line has a task file (FILE.py:Name) that hides a module."""
    for word in words:
        file = word.rpartition("=")[2].partition(":")[0]
        name = os.path.basename(file).removesuffix(".py")
        if file.endswith(".py") and name in sys.stdlib_module_names and os.path.isfile(file):
            print(
                f"oneloop: the file {file!r} hides the module {name!r} of Python itself; give it "
                "another name",
                file=sys.stderr,
            )
            sys.exit(2)
