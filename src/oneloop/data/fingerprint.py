"""The fingerprint of a data set, and the changes between two."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from xxhash import xxh3_64_hexdigest

_NAMED = 3  # at most this many changed files are named


def fingerprint_of(dataset: Any) -> dict[str, Any] | None:
    """Return the result of a data set's ``fingerprint()`` as a dict; None if it has none."""
    method = getattr(dataset, "fingerprint", None)
    fingerprint = method() if callable(method) else None
    if fingerprint is None:
        return None
    if isinstance(fingerprint, Mapping):
        return dict(fingerprint)
    return {"fingerprint": str(fingerprint)}


def content_checksum(described: Any) -> str:
    """Return a hash of a fingerprint, or of its entry ``files``."""
    return xxh3_64_hexdigest(json.dumps(described, sort_keys=True).encode())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per difference between two fingerprints; files by name.

    The checksum of the files' content is compared if both have it: files in a bucket have none.

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
        if lines and key in ("length", "samples", "rows", "groups", "checksum"):
            continue  # these differ because the files differ
        if key == "checksum":
            if old and new:
                lines.append("the content of a file has changed")
            continue
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
