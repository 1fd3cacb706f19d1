"""Remote files in a bucket of S3 or of Google Cloud Storage, by fsspec."""

import random
from typing import Any

from oneloop.basics.bucket import store_errors
from oneloop.tasks.rows.remote.addresses import Address
from oneloop.tasks.rows.remote.store import (
    CONNECTIONS,
    TIMEOUTS,
    RemoteObject,
    RemoteStore,
    changed,
)

_CHANGED = (412, 416)  # status: another version; the range is beyond its end


class _BucketStore(RemoteStore):
    """Base class of stores in a bucket.

    Args:
        address: of the files.
        version: key of an object's version in a listing.
        options: of fsspec's file system.
    """

    def __init__(self, address: Address, version: str, **options: Any) -> None:
        import fsspec

        super().__init__(address)
        self._version = version
        self._matches = address.matches
        self._prefix = address.prefix
        with store_errors(self.address):
            self._fs: Any = fsspec.filesystem(
                address.scheme, skip_instance_cache=True, use_listings_cache=False, **options
            )
        self._folder = address.root.partition("://")[2]

    def _listed(self) -> list[RemoteObject]:
        with store_errors(self.address):
            found = self._fs.find(self._folder, detail=True, prefix=self._prefix)
        objects = []
        for path, about in found.items():
            name = path.removeprefix(f"{self._folder}/")
            # A name that ends with a slash stands for an empty folder.
            if about["type"] != "file" or path.endswith("/") or not self._matches(name):
                continue
            objects.append(RemoteObject(name, about["size"], str(about[self._version])))
        return objects


class S3Store(_BucketStore):
    """Files in a bucket of S3, or of a server with its interface (AWS_ENDPOINT_URL)."""

    def __init__(self, address: Address) -> None:
        connect, answer = TIMEOUTS
        super().__init__(
            address,
            "ETag",
            config_kwargs={
                "connect_timeout": connect,
                "read_timeout": answer,
                "max_pool_connections": CONNECTIONS,
                "retries": {"total_max_attempts": 1},
            },
        )
        self._fs.retries = 1

    def _range(self, item: RemoteObject, start: int, end: int) -> bytes:
        from fsspec.asyn import sync

        with store_errors(self.where(item)):
            try:
                return bytes(sync(self._fs.loop, self._get, item, start, end))
            except OSError as error:
                answer = getattr(error.__cause__, "response", None) or {}
                status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status not in _CHANGED:
                    raise
                raise changed(self.where(item)) from error

    async def _get(self, item: RemoteObject, start: int, end: int) -> bytes:
        """Read a range, on condition that the object is still this version."""
        bucket, _, folder = self._folder.partition("/")
        answer = await self._fs._call_s3(
            "get_object",
            Bucket=bucket,
            Key=f"{folder}/{item.name}".lstrip("/"),
            Range=f"bytes={start}-{end - 1}",
            IfMatch=item.version,
        )
        async with answer["Body"] as body:
            content: bytes = await body.read()
        return content


class GsStore(_BucketStore):
    """Files in a bucket of Google Cloud Storage. No test reads from one."""

    def __init__(self, address: Address) -> None:
        import gcsfs.retry  # type: ignore[import-untyped]

        # It draws its waits from Python's global generator, which the samples of tasks may use.
        gcsfs.retry.random = random.Random()
        super().__init__(address, "generation")

    def _range(self, item: RemoteObject, start: int, end: int) -> bytes:
        path = f"{self._folder}/{item.name}"
        with store_errors(self.where(item)):
            try:
                return bytes(self._fs.cat_file(path, start=start, end=end, generation=item.version))
            except FileNotFoundError as error:
                # The bucket no longer has this generation.
                raise changed(self.where(item)) from error
