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

_CHUNK = 1 << 22
_LISTED = 1000  # a fingerprint names at most this many files


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """Yield a path in the cache, locked: other processes wait at the lock, not in a collective with
    a time limit. Raises ValueError if the cache cannot be written."""
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
    """Return the content of files: ``{"files": {name relative to root: [bytes, xxh3-64]}}``, or a
    digest of very many.

    Checksums are cached by path, size, mtime, ctime and inode, so that a file is read again if one
    of them differs: a copy that keeps size and mtime (``rsync -t``, a restored backup) is noticed.
    Raises ValueError if a file cannot be read."""
    with alone(f"checksums/{xxh3_64_hexdigest(str(root.absolute()).encode())}.json") as cache_file:
        known = _known(cache_file)
        fresh = {}
        with Working("reading checksums", total=len(files)) as bar:
            for file in files:
                try:
                    about = file.stat()
                    entry = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
                    before = known.get(str(file))
                    fresh[str(file)] = (
                        before if before and before[:-1] == entry else [*entry, checksum_of(file)]
                    )
                except OSError as error:
                    raise ValueError(f"{file} cannot be read: {error.strerror}") from error
                bar.advance()
        if any(known.get(file) != entry for file, entry in fresh.items()):
            with replacing(cache_file) as draft:
                draft.write_text(json.dumps({**known, **fresh}))
    named = {below(file, root): [fresh[str(file)][0], fresh[str(file)][-1]] for file in files}
    if len(named) <= _LISTED:
        return {"files": named}
    return {
        "files": {
            "count": len(named),
            "bytes": sum(size for size, _ in named.values()),
            "digest": key_of(named),
        }
    }


def _known(cache_file: Path) -> dict[str, Any]:
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
    return (
        dict(fingerprint) if isinstance(fingerprint, Mapping) else {"fingerprint": str(fingerprint)}
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference between two fingerprints; files by name."""
    lines = [*_of_files(before.get("files"), now.get("files"))]
    for key in dict.fromkeys([*before, *now]):
        there, here = before.get(key), now.get(key)
        if there == here or key == "files" or (lines and key in ("length", "samples", "rows")):
            continue  # the row count differs because the files differ
        if key == "sets" and isinstance(there, Mapping) and isinstance(here, Mapping):
            lines += [
                f"{name} is {'missing' if name in there else 'new'}"
                for name in there.keys() ^ here.keys()
            ]
            for name in there.keys() & here.keys():
                lines += [f"{name}: {line}" for line in changes(there[name], here[name])]
        elif key in ("length", "samples"):
            lines.append(
                f"{here:,} samples, not {there:,}"
                if there and here
                else f"{there} -> {here} samples"
            )
        else:
            lines.append(f"{key} {there} -> {here}")
    return lines


def _of_files(before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        yield "new files" if not before else "missing files"
        return
    if "digest" in before or "digest" in now:
        count, here = before.get("count", len(before)), now.get("count", len(now))
        yield (
            f"{here:,} files, expected {count:,}"
            if count != here
            else "the content of a file has changed"
        )
        return
    gone, new = [n for n in before if n not in now], [n for n in now if n not in before]
    renamed = [(old, name) for old in gone for name in new if before[old] == now[name]]
    for old, name in renamed[:_NAMED]:
        yield f"{old} was renamed to {name}"
    yield from _listed(
        "is new", [name for name in new if name not in {name for _, name in renamed}]
    )
    yield from _listed(
        "is missing", [old for old in gone if old not in {old for old, _ in renamed}]
    )
    yield from _listed(
        "has different content", [n for n in before if n in now and before[n] != now[n]]
    )


def _listed(what: str, names: list[str]) -> Iterator[str]:
    yield from (f"{name} {what}" for name in names[:_NAMED])
    if len(names) > _NAMED:
        yield f"{len(names) - _NAMED} more files: {what}"
