"""The ``oneloop`` command, also ``python -m oneloop``."""

import sys

from oneloop.basics.system import exit_if_not_supported


def main() -> int:
    """Run the command that the arguments name; return its exit code."""
    exit_if_not_supported()
    # imports modules that Windows lacks
    from oneloop.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
