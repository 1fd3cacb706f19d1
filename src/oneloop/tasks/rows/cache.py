"""Cached files and checksums of data, and the changes between two fingerprints."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_hexdigest

from oneloop.basics.files import cache_folder, replacing, set_aside, writing
from oneloop.basics.progress import Working

_CHUNK = 1 << 22  # bytes of a file per read
_LISTED = 1000  # a fingerprint names at most this many files


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """Yield a path in the cache, locked.

    Other processes wait at the lock, and not in a collective with a time limit.

    Args:
        name: path relative to the cache: of a file if it has a suffix, else of a folder.

    Raises:
        BadInput: the cache cannot be written, or its disk is full.
    """
    path = cache_folder() / name
    remedy = "make room, or set ONELOOP_CACHE to another folder"
    with writing(path, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire()
        # A name with a suffix is that of a file.
        if path.exists() and path.is_dir() == bool(path.suffix):
            set_aside(path)
    try:
        with writing(path, remedy, only_full=True):
            yield path
    finally:
        lock.release()


def cached_json(name: str, make: Callable[[], Any]) -> Any:
    """Return the JSON value in a file of the cache.

    If the file is missing or damaged, store what ``make`` returns.
    """
    with alone(name) as path:
        value = _stored(path)
        if value is None:
            value = make()
            with replacing(path) as draft:
                draft.write_text(json.dumps(value))
        return value


def key_of(*values: Any) -> str:
    """Return a hash of JSON values as a cache key."""
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def rows_content(rows: Any) -> Any:
    """Return a description of rows by content, for the keys of caches: not for a resume.

    Args:
        rows: the rows. If they have no ``cache_key()``, their fingerprint describes their content.
    """
    return rows.cache_key() if hasattr(rows, "cache_key") else rows.fingerprint()


def numbers_key(numbers: NDArray[np.int64]) -> str:
    """Return a key for these row numbers."""
    return f"{len(numbers)}: {xxh3_64_hexdigest(np.ascontiguousarray(numbers, '<i8').tobytes())}"


def below(file: PurePath, root: PurePath) -> str:
    """Return the file's path relative to ``root``, or its name if it is ``root``."""
    return file.name if file == root else file.relative_to(root).as_posix()


def content_of(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Return the sizes and checksums of files, as a fingerprint.

    It is ``{"files": {name relative to root: [bytes, xxh3-64]}}``, or a digest of very many files.
    Checksums are cached by path, size, mtime, ctime and inode, so that a file is read again if one
    of them differs: a copy that keeps size and mtime (``rsync -t``, a restored backup) is noticed.

    Args:
        files: the files.
        root: the folder of the data set, or its only file.

    Raises:
        ValueError: a file cannot be read.
    """
    with alone(f"checksums/{xxh3_64_hexdigest(str(root.absolute()).encode())}.json") as cache_file:
        # Read only the files that have changed since their checksum was cached.
        known = _stored(cache_file) or {}
        fresh = {}
        with Working("reading checksums", total=len(files)) as bar:
            for file in files:
                try:
                    about = file.stat()
                    entry = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
                    cached = known.get(str(file))
                    if cached and cached[:-1] == entry:
                        fresh[str(file)] = cached
                    else:
                        fresh[str(file)] = [*entry, checksum_of(file)]
                except OSError as error:
                    raise ValueError(f"{file} cannot be read: {error.strerror}") from error
                bar.advance()
        if any(known.get(file) != entry for file, entry in fresh.items()):
            with replacing(cache_file) as draft:
                draft.write_text(json.dumps({**known, **fresh}))

    named = {}
    for file in files:
        size, *_, checksum = fresh[str(file)]
        named[below(file, root)] = [size, checksum]
    return described(named)


def described(named: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return files as a part of a fingerprint: each by name, or a digest of very many.

    Args:
        named: bytes of each file, and a hash, by name relative to the data set's folder.
    """
    if len(named) <= _LISTED:
        return {"files": dict(named)}
    return {"files": {"count": len(named), "digest": key_of(named)}}


def _stored(file: Path) -> Any:
    """Return the JSON value in a file; None if the file is missing or damaged."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def checksum_of(file: Path) -> str:
    """Return the xxh3-64 of a file's content, as hexadecimal."""
    state = xxh3_64()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            state.update(piece)
    return state.hexdigest()
