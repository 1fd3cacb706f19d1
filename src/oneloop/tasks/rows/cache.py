"""Cached files and checksums of data, and the changes between two fingerprints."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_hexdigest

from oneloop.basics.files import cache_folder, replacing
from oneloop.basics.progress import Working

_CHUNK = 1 << 22  # bytes of a file per read
_LISTED = 1000  # a fingerprint names at most this many files


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """Yield a path in the cache, locked.

    Other processes wait at the lock, and not in a collective with a time limit.

    Args:
        name: path relative to the cache.

    Raises:
        ValueError: the cache cannot be written.
    """
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); set ONELOOP_CACHE to another"
        ) from error
    try:
        yield path
    finally:
        lock.release()


def key_of(*values: Any) -> str:
    """Return a hash of JSON values as a cache key."""
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def numbers_key(numbers: NDArray[np.int64], *, exclude: bool) -> str:
    """Return a key for these row numbers, or (``exclude``) for all others."""
    digest = xxh3_64_hexdigest(np.ascontiguousarray(numbers, "<i8").tobytes())
    return f"{'all but ' if exclude else ''}{len(numbers)}: {digest}"


def below(file: Path, root: Path) -> str:
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
        known = _known(cache_file)
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

    # Describe each file, or all together if there are very many.
    named = {}
    for file in files:
        size, *_, checksum = fresh[str(file)]
        named[below(file, root)] = [size, checksum]
    if len(named) <= _LISTED:
        return {"files": named}
    digest = {
        "count": len(named),
        "bytes": sum(size for size, _ in named.values()),
        "digest": key_of(named),
    }
    return {"files": digest}


def _known(cache_file: Path) -> dict[str, Any]:
    """Return the cached checksums; empty if the file is missing or damaged."""
    try:
        known = json.loads(cache_file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def checksum_of(file: Path) -> str:
    """Return the xxh3-64 of a file's content, as hexadecimal."""
    state = xxh3_64()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            state.update(piece)
    return state.hexdigest()


_NAMED = 3  # at most this many changed files are named


def fingerprint_of(dataset: Any) -> dict[str, Any] | None:
    """Return the result of a data set's ``fingerprint()`` as a dict; None if it has none."""
    fingerprint = dataset.fingerprint() if hasattr(dataset, "fingerprint") else None
    if fingerprint is None:
        return None
    if isinstance(fingerprint, Mapping):
        return dict(fingerprint)
    return {"fingerprint": str(fingerprint)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference between two fingerprints; files by name.

    Args:
        before: the recorded fingerprint.
        now: the current one.
    """
    lines = list(_of_files(before.get("files"), now.get("files")))
    for key in dict.fromkeys([*before, *now]):
        old = before.get(key)
        new = now.get(key)
        if old == new or key == "files":
            continue
        if lines and key in ("length", "samples", "rows"):
            continue  # the row count differs because the files differ
        if key == "sets" and isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += _of_sets(old, new)
        elif key in ("length", "samples") and old and new:
            lines.append(f"{new:,} samples, not {old:,}")
        elif key in ("length", "samples"):
            lines.append(f"{old} -> {new} samples")
        elif old is None:
            lines.append(f"{key}: {new}")
        else:
            lines.append(f"{key} {old} -> {new}")
    return lines


def _of_sets(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per difference between the sets of two mixtures."""
    for name in before.keys() ^ now.keys():
        yield f"{name} is {'missing' if name in before else 'new'}"
    for name in before.keys() & now.keys():
        for line in changes(before[name], now[name]):
            yield f"{name}: {line}"


def _of_files(before: Any, now: Any) -> Iterator[str]:
    """Yield one line per difference between the files of two fingerprints."""
    if before == now:
        return
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        yield "new files" if not before else "missing files"
        return

    # Compare the numbers of files if there are too many to list.
    if "digest" in before or "digest" in now:
        old_count = before.get("count", len(before))
        new_count = now.get("count", len(now))
        if old_count != new_count:
            yield f"{new_count:,} files, expected {old_count:,}"
        else:
            yield "the content of a file has changed"
        return

    # A file of the same content under a new name was renamed.
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    renamed = [(old, name) for old in gone for name in new if before[old] == now[name]]
    for old, name in renamed[:_NAMED]:
        yield f"{old} was renamed to {name}"
    old_names = {old for old, _ in renamed}
    new_names = {name for _, name in renamed}
    yield from _listed("is new", [name for name in new if name not in new_names])
    yield from _listed("is missing", [name for name in gone if name not in old_names])

    both = [name for name in before if name in now]
    different = [name for name in both if before[name] != now[name]]
    yield from _listed("has different content", different)


def _listed(what: str, names: list[str]) -> Iterator[str]:
    """Yield a line for each of the first names, and one for the others."""
    for name in names[:_NAMED]:
        yield f"{name} {what}"
    if len(names) > _NAMED:
        yield f"{len(names) - _NAMED} more files: {what}"
