"""The words of a command line: options, and what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.basics.errors import BadInput


def parsed(
    command: str, words: Sequence[str], options: Mapping[str, str | bool | None], *, several: bool = False
) -> dict[str, Any]:
    """Values by option, and RUN: a folder, or a list of them. An option whose default is False takes no value.

    Args:
        command: its name, for messages.
        words: as typed after it.
        options: with their defaults.
        several: whether it takes more than one run.

    Raises:
        BadInput: an unknown word, a value or the run missing.
    """
    given: dict[str, Any] = {"RUN": [], **options}
    takes = f"RUN{' [RUN …]' if several else ''} {' '.join(options)}"
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if options.get(name) is False:
            given[name] = True
        elif name in options:
            if not equals and not rest:
                raise BadInput(f"oneloop {command}: {name} needs a value")
            given[name] = value if equals else rest.pop(0)
        elif word.startswith("-") or (given["RUN"] and not several):
            raise BadInput(f"oneloop {command}: unexpected {word!r}; it takes {takes}")
        else:
            given["RUN"].append(word)
    if not given["RUN"]:
        raise BadInput(f"oneloop {command} needs a run folder: oneloop {command} runs/digits")
    return given if several else {**given, "RUN": given["RUN"][0]}
