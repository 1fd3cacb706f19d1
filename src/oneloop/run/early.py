"""What a run does before the slow imports: it is watched from then on, and tells of bad input at once."""

import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

from oneloop.basics import errors
from oneloop.basics.errors import BadInput
from oneloop.basics.files import printable
from oneloop.basics.launcher import rank
from oneloop.recipe.parse import read
from oneloop.recipe.schema import Recipe
from oneloop.run.stopping import leave
from oneloop.supervise.fork import open_streams, supervised
from oneloop.supervise.link import LINK


def begin() -> None:
    """Reads the command line, in a process that is watched from now on; ``--help`` and bad input end here."""
    open_streams()
    supervised()
    report(sys.argv[1:])


def report(argv: Sequence[str]) -> None:
    """Reads these words, and tells from now on how this process gets on, where it is watched."""
    try:
        recipe = read_once(tuple(argv))
    except BadInput as error:
        refuse(error)
    except SystemExit as end:  # --help
        LINK.tell(ended=end.code or 0)
        raise
    LINK.report(recipe.machine.patience)


@cache
def read_once(argv: tuple[str, ...]) -> Recipe:
    """:func:`oneloop.recipe.parse.read`, once for each command line."""
    return read(argv)


def refuse(error: BadInput) -> NoReturn:
    """Says what was wrong, on rank 0, and ends this process."""
    if is_main():
        print(printable(f"oneloop: {error}"), file=sys.stderr)
    leave(errors.BAD_INPUT, main=is_main())


def is_main() -> bool:
    """Whether this is rank 0, by the launcher's word: accelerate need not be there yet."""
    return rank() == 0
