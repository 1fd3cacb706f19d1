"""A store of remote files: lists objects with their versions, and reads ranges of one version."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from oneloop.basics.bucket import StoreChangedError, StoreError
from oneloop.tasks.rows.remote.addresses import Address, is_safe

TIMEOUTS = (5, 15)  # seconds to connect, and to wait for an answer
CONNECTIONS = 32  # at the same time; more than a process has threads that read
_TRIES = 5
_FIRST_WAIT = 0.5  # seconds before the second try; doubles with each further one


OnRetry = Callable[[int, StoreError], None]
"""gets the number of failed tries of a request, and the last error"""


def ignore_retry(tries: int, error: StoreError) -> None:
    """Do nothing when a request is tried again."""


@dataclass(frozen=True)
class RemoteObject:
    """A version of a file in a store.

    Args:
        name: path relative to the root of the store.
        size: bytes.
        version: ETag, generation or commit; never empty.
    """

    name: str
    size: int
    version: str


class RemoteStore(ABC):
    """Base class of stores. A store must not cross a fork; threads may share it.

    Args:
        address: of the files.
    """

    def __init__(self, address: Address) -> None:
        self.address = address.text
        self.root = address.root
        self.pattern = address.pattern

    def objects(self) -> list[RemoteObject]:
        """Return what the address names, sorted by name, without hidden files.

        Raises:
            StoreError: the store cannot be reached, or holds no such file.
            ValueError: a name leads out of the folder.
        """
        found = []
        for item in self._listed():
            if not is_safe(item.name):
                raise ValueError(
                    f"{self.address}: the name {item.name!r} is not a plain path below its folder; "
                    "rename the file"
                )
            if not any(part.startswith(".") for part in item.name.split("/")):
                found.append(item)
        return sorted(found, key=lambda item: item.name)

    def read(
        self,
        item: RemoteObject,
        start: int,
        end: int,
        *,
        on_retry: OnRetry = ignore_retry,
    ) -> bytes:
        """Return a range of bytes of an object; try again after temporary errors.

        Args:
            item: the object.
            start: first byte.
            end: after the last byte.
            on_retry: called before each further try.

        Raises:
            StoreChangedError: the object has another version now.
            StoreError: it cannot be read.
        """
        if start == end:
            return b""
        for failed in range(_TRIES):
            try:
                content = self._range(item, start, end)
                if len(content) == end - start:
                    return content
                raise StoreError(
                    f"{self.where(item)}: {len(content):,} bytes came of {end - start:,}"
                )
            except StoreError as error:
                if not error.temporary or failed + 1 == _TRIES:
                    raise
                on_retry(failed + 1, error)
            # Random waits keep many readers from retrying at the same time.
            time.sleep(_FIRST_WAIT * 2**failed * random.Random().uniform(0.5, 1.5))
        raise AssertionError

    def where(self, item: RemoteObject) -> str:
        """Return the address of an object."""
        return f"{self.root}/{item.name}"

    @abstractmethod
    def _listed(self) -> list[RemoteObject]:
        """Return the objects that the address names, with any names."""

    @abstractmethod
    def _range(self, item: RemoteObject, start: int, end: int) -> bytes:
        """Try once to read a range."""


def changed(where: str) -> StoreChangedError:
    """Return the error for an object that has changed since it was listed."""
    return StoreChangedError(
        f"{where} has changed since this run listed it; restore it, or begin a new run"
    )
