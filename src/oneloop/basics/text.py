"""Text from files and from other people's code, as it may be shown on a terminal."""

from __future__ import annotations

import re


def printable(text: object) -> str:
    """The text with control characters written out (``\\x1b``), so that it moves no cursor; line ends stay."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in shown
    )


def one_line(error: object) -> str:
    """A message of several lines on one."""
    return re.sub(r"\s*\n\s*", " ", str(error)).strip()
