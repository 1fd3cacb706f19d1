"""Stores of frozen outputs: a folder for each key, with one checked file per range of documents.

A store is in the cache of this host, in a folder that hosts share, or in a bucket, from which each
host copies it to its cache.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

from oneloop.basics.bucket import Bucket, StoreError, StoreNotFoundError, ends_program
from oneloop.basics.files import dumps, replacing, set_aside, vouched, writing
from oneloop.basics.untrusted import delete
from oneloop.frozen.listing import ABOUT, stores
from oneloop.frozen.outputs import FrozenOutputs, range_name

FORMAT = 1  # increase it if files, batches or keys change
_REMEDY = "make room, name another folder with task.store, or set ONELOOP_CACHE"
_DIGEST = 16  # bytes of the checksum at the end of a file


def key_of(parts: Mapping[str, Any]) -> str:
    """Return the key of a store: a hash of JSON values, 32 hexadecimal digits."""
    text = json.dumps({**parts, "format": FORMAT}, sort_keys=True)
    return xxh3_128_hexdigest(text.encode())


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of a bucket into those that end a program; a missing object stays as it is."""
    try:
        yield
    except StoreNotFoundError:
        raise
    except StoreError as error:
        raise ends_program(error, "task.store") from error


@dataclass
class RangeFiles:
    """The files of one store.

    Args:
        root: folder of all stores.
        parts: JSON values that identify the outputs.
        outputs: their records, and the ranges of documents.
        address: a bucket that has the same files; None: there is none.
    """

    root: Path
    parts: Mapping[str, Any]
    outputs: FrozenOutputs
    address: str | None = None

    def __post_init__(self) -> None:
        self.key = key_of(self.parts)
        self.folder = self.root / self.key

    @cached_property
    def bucket(self) -> Bucket | None:
        """The bucket that has the same files; None: there is none."""
        if self.address is None:
            return None
        with _errors():
            return Bucket(self.address)

    def of_other_sources(self) -> dict[str, str] | None:
        """Return the sources of a store that differs from this one in nothing else, or None.

        Also return None if the stores cannot be listed: this is only for a message.
        """
        same = key_of({**self.parts, "sources": None})
        with suppress(StoreError, OSError):
            for store in stores(self.address or str(self.root)):
                there = (store.about or {"parts": {}})["parts"]
                if store.key != self.key and key_of({**there, "sources": None}) == same:
                    return dict(there.get("sources", {}))
        return None

    def begin(self) -> None:
        """Make the folder on this host, and describe the store there, unless both exist.

        Raise BadInput if that is impossible.
        """
        with writing(self.folder, _REMEDY):
            if self.folder.is_file():
                set_aside(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / ABOUT).is_file():
                with replacing(self.folder / ABOUT, shared=True) as draft:
                    draft.write_text(self._about())

    def announce(self) -> None:
        """Describe the store in the bucket, if there is one, before its files are written."""
        if self.bucket:
            with _errors():
                self.bucket.put(f"{self.key}/{ABOUT}", self._about().encode())

    def _about(self) -> str:
        about = {
            "parts": dict(self.parts),
            "documents": len(self.outputs),
            "bytes": self.outputs.bytes,
            "ranges": self.outputs.ranges,
        }
        return dumps(vouched(about), indent=1)

    def fault(self, number: int) -> str | None:
        """Return what is wrong with the file of a range: empty if it is missing; None: nothing."""
        file = self.folder / range_name(number)
        expected = self.outputs.records_of(number) * self.outputs.record.itemsize
        try:
            size = file.stat().st_size
            if size != expected + _DIGEST:
                return f"it has {size:,} bytes, expected {expected + _DIGEST:,}"
            content = file.read_bytes()
        except OSError:
            return ""
        if content[expected:] != self._digest(number, content[:expected]):
            return "its checksum differs"
        return None

    def drop(self, number: int) -> None:
        """Delete the file of a range, so that no process of this host reads it."""
        delete(self.folder / range_name(number), inside=self.folder)

    def fetch(self, number: int) -> bool:
        """Copy the file of a range from the bucket; return whether it is there, and is good."""
        if self.bucket is None:
            return False
        name = range_name(number)
        try:
            with (
                writing(self.folder, _REMEDY),
                _errors(),
                replacing(self.folder / name, shared=True) as draft,
            ):
                self.bucket.fetch(f"{self.key}/{name}", draft)
        except StoreNotFoundError:
            return False
        if self.fault(number) is None:
            return True
        self.drop(number)
        return False

    def write(self, number: int, records: NDArray[Any]) -> None:
        """Write the file of a range, atomically; also to the bucket, if there is one."""
        content = np.ascontiguousarray(records).tobytes()
        content += self._digest(number, content)
        name = range_name(number)
        with (
            writing(self.folder, _REMEDY),
            replacing(self.folder / name, shared=True) as draft,
        ):
            draft.write_bytes(content)
        if self.bucket:
            with _errors():
                self.bucket.put(f"{self.key}/{name}", content)

    def present(self) -> bool:
        """Return whether this host sees the files of all ranges."""
        names = set[str]()
        with suppress(OSError):
            names = {file.name for file in self.folder.iterdir()}
        return all(range_name(number) in names for number in range(self.outputs.ranges))

    def _digest(self, number: int, content: bytes) -> bytes:
        """Return the checksum of a range; that of another range or store differs."""
        state = xxh3_128(f"{self.key} {number} ".encode())
        state.update(content)
        return state.digest()
