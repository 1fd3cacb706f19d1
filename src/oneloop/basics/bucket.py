"""Objects in a bucket (``s3://``, ``gs://``) or a folder (``file://``), by fsspec."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from xxhash import xxh3_128

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import one_line
from oneloop.basics.untrusted import MOST_BYTES

BLOCK = 1 << 23  # bytes that one request writes or reads
_PARTS = 9000  # of one upload; S3 allows 10,000
_AT_ONCE = 8  # blocks that are read at the same time
# seconds; botocore tries five times (AWS_MAX_ATTEMPTS)
_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 15}},
}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}


def is_address(text: object) -> bool:
    """Return whether a text is an address (``s3://…``) and not a path."""
    return "://" in str(text)


def check_address(address: str, key: str) -> None:
    """Raise BadInput if files cannot be written to this address, without secrets in its message.

    ``key`` names the option for the message.
    """
    scheme, netloc, path, query, fragment = urlsplit(address)
    if "@" in netloc or query or fragment:
        # without the address, which may contain a secret
        raise BadInput(
            f"{key}: the address contains a user, a password or a query; remove it, and take "
            "credentials from the environment (AWS_ACCESS_KEY_ID, …) or the provider's files"
        )
    if scheme not in _PACKAGES:
        raise BadInput(
            f"{key} {address}: {scheme}:// cannot be used here; name s3://, gs:// or file://"
        )
    folders = path.strip("/").split("/")
    if not path.strip("/") or ".." in folders or (scheme == "file") == bool(netloc):
        raise BadInput(
            f"{key} {address} must name a folder: s3://BUCKET/RUN, gs://BUCKET/RUN or "
            "file:///FOLDER/RUN"
        )
    if find_spec(_PACKAGES[scheme]) is None:
        raise BadInput(f"{key} {address} needs {_PACKAGES[scheme]}: pip install 'oneloop[buckets]'")


class StoreError(OSError):
    """An error of a bucket."""

    temporary = True  # whether the same request may work later


class StoreNotFoundError(StoreError, FileNotFoundError):
    """An error: the bucket or the object does not exist."""

    temporary = False


class StoreExistsError(StoreError, FileExistsError):
    """An error: an object that should be new exists."""

    temporary = False


class StoreDeniedError(StoreError, PermissionError):
    """An error: credentials or rights are missing, or the address cannot be one of a folder."""

    temporary = False


class StoreChangedError(StoreError):
    """An error: an object has changed since it was listed."""

    temporary = False


_KINDS: dict[type[Exception], type[StoreError]] = {
    FileNotFoundError: StoreNotFoundError,
    FileExistsError: StoreExistsError,
    PermissionError: StoreDeniedError,
    NotADirectoryError: StoreDeniedError,
    IsADirectoryError: StoreDeniedError,
}
_DENIED = ("Credentials", "ParamValidation", "InvalidArn")
"""parts of class names of errors that a user must correct"""


@contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Raise every error as a StoreError that names the address."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # those of botocore and aiohttp are of many classes
        found = [known for raised, known in _KINDS.items() if isinstance(error, raised)]
        kind = found[0] if found else StoreError
        if any(part in type(error).__name__ for part in _DENIED):
            kind = StoreDeniedError
        raise kind(f"{address}: {type(error).__name__}: {one_line(error)}") from error


def ends_program(error: StoreError, what: str = "task.data") -> BadInput | Unavailable:
    """Return the error that ends a program which cannot read ``what``, before a run begins."""
    if error.temporary:
        return Unavailable(
            f"{what} cannot be read now: {error}; check the network, and start the same command "
            "again"
        )
    return BadInput(f"{what} cannot be read: {error}; check address and credentials")


class Bucket:
    """The objects below an address (s3, gs, file or, within one process, memory).

    It must not cross a fork. Errors are :class:`StoreError`, of which some are also
    FileNotFoundError, FileExistsError or PermissionError.

    Args:
        address: of the objects.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        self._errors = partial(store_errors, self.address)
        scheme = address.partition("://")[0]
        self._is_local = scheme == "file"
        with self._errors():
            self._fs: Any = fsspec.filesystem(
                scheme,
                skip_instance_cache=True,
                use_listings_cache=False,
                **_OPTIONS.get(scheme, {}),
            )
            if scheme == "s3":
                self._fs.retries = 1  # of s3fs: botocore's are enough
            self._root = self._fs._strip_protocol(self.address)

    def get(self, name: str, most: int = MOST_BYTES) -> bytes:
        """Return the content of a small object.

        Raises ValueError if it is longer than ``most`` bytes.
        """
        path = f"{self._root}/{name}"
        with self._errors():
            size = self._fs.info(path)["size"]
        if size > most:
            raise ValueError(f"{self.address}/{name} is longer than {most:,} bytes")
        with self._errors():
            return bytes(self._fs.cat_file(path))

    def fetch(self, name: str, file: Path, size: int) -> str:
        """Copy an object to a file on this machine; a few blocks are read at the same time.

        Args:
            name: of the object.
            file: to write.
            size: of the object, in bytes.

        Returns:
            The xxh3-128 of its content, as hexadecimal.
        """
        checksum = xxh3_128()
        with file.open("wb") as stream:
            for first in range(0, size, _AT_ONCE * BLOCK):
                starts = range(first, min(size, first + _AT_ONCE * BLOCK), BLOCK)
                ends = [min(size, start + BLOCK) for start in starts]
                paths = [f"{self._root}/{name}"] * len(ends)
                with self._errors():
                    blocks = self._fs.cat_ranges(paths, [*starts], ends, on_error="raise")
                for block in blocks:
                    stream.write(block)
                    checksum.update(block)
        return checksum.hexdigest()

    def put(self, name: str, data: bytes, *, create: bool = False) -> None:
        """Write a small object atomically; ``create`` raises FileExistsError if it exists."""
        path = f"{self._root}/{name}"
        with self._errors():
            if not self._is_local:
                self._fs.pipe_file(path, data, mode="create" if create else "overwrite")
                return
            draft = path if create else f"{self._root}/.{uuid4().hex}.draft"
            with self._fs.open(draft, "xb") as stream:
                stream.write(data)
            os.replace(draft, path)

    def write(self, name: str, pieces: Iterable[Any], size: int = 0) -> dict[str, Any]:
        """Write an object, with one block in memory; return its manifest entry.

        Args:
            name: of the object.
            pieces: its content (bytes or memoryviews), each of at most BLOCK bytes.
            size: about how many bytes that will be.
        """
        checksum = xxh3_128()
        path = f"{self._root}/{name}"
        with self._errors():
            if self._is_local:
                stream = self._fs.open(path, "wb")
            else:
                # A larger object needs larger parts, because their number is limited.
                stream = self._fs.open(path, "wb", block_size=max(BLOCK, size // _PARTS))
            try:
                for piece in pieces:
                    stream.write(piece)
                    checksum.update(piece)
                size = stream.tell()
            except BaseException:
                # Leave no half of an object: closing would complete it.
                if not self._is_local:
                    stream.discard()
                    stream.closed = True
                raise
            stream.close()
        return {"size": size, "xxh3": checksum.hexdigest()}

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all objects below a folder, by their names relative to it."""
        below = f"{self._root}/{folder}".rstrip("/")
        with self._errors():
            found = self._fs.find(below, detail=True)
        sizes = {}
        for name, entry in found.items():
            if entry["type"] == "file" and len(name) > len(below):
                sizes[name[len(below) + 1 :]] = entry["size"]
        return sizes

    def remove(self, name: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError), self._errors():
            self._fs.rm_file(f"{self._root}/{name}")
