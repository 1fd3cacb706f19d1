"""A bar for whatever takes its time, from any depth: ``show.display`` puts up the bars, others say what they do.

>>> for batch in tracked(loader, "evaluating", total=len(loader)):
...     ...
>>> with Working("training the tokenizer"):
...     ...
"""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from rich.progress import Progress

from oneloop.basics.heartbeats import BEATS

Item = TypeVar("Item")

BARS: ContextVar[Progress | None] = ContextVar("bars", default=None)
"""the bars that are up; None: none are, and nothing here shows anything"""


class Working:
    """A bar without an end, for what is under way: until :meth:`done`, or as a context."""

    def __init__(self, what: str, *, total: int | None = None) -> None:
        self._bars = BARS.get()
        self._task: Any = self._bars.add_task(what, total=total, text="") if self._bars else None

    def advance(self) -> None:
        """One more of them is done; a sign of life."""
        BEATS.beat()
        if self._bars and self._task is not None:
            self._bars.advance(self._task)

    def done(self) -> None:
        """It has ended."""
        if self._bars and self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None

    def __enter__(self) -> "Working":
        return self

    def __exit__(self, *of: object) -> None:
        self.done()


def tracked(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """The items, with a bar while they are gone through."""
    with Working(what, total=total) as bar:
        for item in items:
            yield item
            bar.advance()
