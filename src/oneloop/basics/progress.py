"""Progress bars from any depth of the code; ``show.terminal`` creates their display.

>>> for batch in tracked(loader, "evaluating", total=len(loader)):
...     ...
>>> with Working("training the tokenizer"):
...     ...
"""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from rich.progress import Progress

from oneloop.basics.heartbeats import BEATS

Item = TypeVar("Item")

BARS: ContextVar[Progress | None] = ContextVar("bars", default=None)
"""the current display of bars; None: no bars are shown"""


class Working:
    """A progress bar that ends with :meth:`done`, or as a context.

    Without ``total``, it only shows that work is in progress.
    """

    def __init__(self, what: str, *, total: int | None = None) -> None:
        self._bars = BARS.get()
        if self._bars:
            self._task = self._bars.add_task(what, total=total, text="")

    def advance(self) -> None:
        """Advance the bar by one; also a heartbeat."""
        BEATS.beat()
        if self._bars:
            self._bars.advance(self._task)

    def done(self) -> None:
        """Remove the bar."""
        if self._bars:
            self._bars.remove_task(self._task)
            self._bars = None

    def __enter__(self) -> "Working":
        return self

    def __exit__(self, *of: object) -> None:
        self.done()


def tracked(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """Yield the items, and show a bar meanwhile."""
    with Working(what, total=total) as bar:
        for item in items:
            yield item
            bar.advance()
