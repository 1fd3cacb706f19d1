"""A store of which every call ends, also if the process that holds it is stopped."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

LOST = 10.0  # seconds without an answer after which the node of the rendezvous counts as lost
_OTHERS = timedelta(seconds=20)  # time in which another node writes a value
_POLL = 0.05  # seconds between two looks for a value


def answered(ask: Callable[..., Any], *words: Any) -> Any:
    """Return ``ask(*words)``, or raise its error.

    Raise DistStoreError if it does not return in :data:`LOST` seconds; it then stays on its thread.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask(*words))
        except Exception as error:
            answer.set_exception(error)

    # Wait in short pieces: time in which this process itself is stopped counts as one piece.
    thread = Thread(target=run, daemon=True)
    thread.start()
    for _ in range(int(LOST)):
        thread.join(1.0)
        if not thread.is_alive():
            return answer.result()
    raise DistStoreError(f"no answer in {LOST:.0f} s")


class BoundedStore(Store):
    """torch's store of the rendezvous, with a time limit for every call.

    A call of TCPStore waits without end for a stopped process, and for minutes after a link is cut:
    only the wait for a missing value has a limit there. Here each call raises DistError if the
    store does not answer. After that, all calls raise it at once.

    Args:
        store: a connection.
    """

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(_OTHERS)
        self.lost = False  # whether a call had no answer

    def _ask(self, name: str, *words: Any) -> Any:
        if self.lost:
            raise DistStoreError("the store did not answer before")
        try:
            return answered(getattr(self._store, name), *words)
        except RuntimeError:  # all errors of stores
            self.lost = True
            raise

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Return a value. Wait for it."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, number: int) -> int:
        """Add to a number; return the sum."""
        return int(self._ask("add", key, number))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are set."""
        return bool(self._ask("check", [*keys]))

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        """Set a value if it is as ``expected``; return the value."""
        return bytes(self._ask("compare_set", key, expected, value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values; raise DistStoreError after ``timeout``.

        It looks again and again: other threads can use the store meanwhile, and a signal
        interrupts it.
        """
        limit = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        until = time.monotonic() + limit
        while not self.check(keys):
            if time.monotonic() > until:
                raise DistStoreError(f"{', '.join(keys)} missing for {limit:.0f} s")
            time.sleep(_POLL)
