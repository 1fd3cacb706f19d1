"""Parser for the options of a command."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from inspect import cleandoc
from typing import Any, NoReturn

from oneloop.basics.exit_codes import BadInput


class Options(ArgumentParser):
    """The options of a command, whose help page is ``about``; a wrong option raises BadInput."""

    def __init__(self, command: str, about: str | None, *, usage: str | None = None) -> None:
        super().__init__(
            f"oneloop {command}",
            usage,
            cleandoc(about or ""),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    @property
    def names(self) -> set[str]:
        """Names of the options."""
        return {action.dest for action in self._actions}

    def error(self, message: str) -> NoReturn:
        """Raise BadInput."""
        # An option's type may have raised an error that says more.
        why = getattr(sys.exc_info()[1], "__context__", None)
        if isinstance(why, BadInput):
            raise why
        raise BadInput(
            f"{self.prog}: {message.removeprefix('argument ')}; {self.prog} --help lists the "
            "options"
        )


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an option type that parses a positive number with ``kind`` (int or float)."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not number > 0:
            raise ArgumentTypeError(
                f"must be a positive {'integer' if kind is int else 'number'}, got {text}"
            )
        return number

    return parse


def names(text: str) -> list[str]:
    """Return the names in a list that commas separate."""
    return [name for name in text.split(",") if name]


def summary(page: str) -> str:
    """Return the first paragraph of a help page, on one line."""
    return " ".join(page.strip().partition("\n\n")[0].split())
