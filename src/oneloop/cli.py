"""The ``oneloop`` command. The docstring of each command's function is its help page."""

import sys
from collections.abc import Callable, Sequence

from oneloop.basics.command_options import summary
from oneloop.basics.exit_codes import BAD_INPUT, DONE, BadInput, Unavailable
from oneloop.basics.files import printable
from oneloop.basics.houses import COMMANDS, missing, required
from oneloop.basics.streams import replace_unknown_characters
from oneloop.basics.system.signals import on_stops
from oneloop.launch.launched import end_early

Command = Callable[[Sequence[str]], int]
"""takes the words after its name, returns oneloop's exit code"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``oneloop`` command; return its exit code."""
    replace_unknown_characters()
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] == ["launch"]:
        on_stops(end_early)  # until the processes are started
    if not words or words[0] in ("-h", "--help"):
        print("usage: oneloop COMMAND … (oneloop COMMAND --help explains a command)\n")
        for name in COMMANDS:
            about = missing(name) or summary(command(name).__doc__ or "")
            print(f"  {name:10}{about}")
        return DONE if words else BAD_INPUT
    try:
        return command(words[0])(words[1:])
    except (BadInput, Unavailable) as error:
        print(printable(f"oneloop: {error}"), file=sys.stderr)
        return error.code
    except SystemExit as end:  # --help
        return int(end.code or 0)


def command(name: str) -> Command:
    """Return the function of a command; its docstring begins with a summary.

    Raise BadInput for an unknown command, or one of a tool that was deleted."""
    if name not in COMMANDS:
        raise BadInput(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
    function: Command = getattr(required(name), name)
    return function
