"""What two fingerprints of data differ in, for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = 3
"""files that are named one by one"""


def fingerprint_of(dataset: Any) -> dict[str, Any] | None:
    """What a data set says of its content by its own ``fingerprint()``; None where it does not."""
    told = dataset.fingerprint() if hasattr(dataset, "fingerprint") else None
    return dict(told) if isinstance(told, Mapping) else {"fingerprint": str(told)} if told is not None else None


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each thing that changed; files by name."""
    found = [*_of_files(before.get("files"), now.get("files"))]
    for key in dict.fromkeys([*before, *now]):
        there, here = before.get(key), now.get(key)
        if there == here or key == "files" or (found and key in ("length", "samples", "rows")):
            continue  # rows are others because files are
        if key == "sets" and isinstance(there, Mapping) and isinstance(here, Mapping):
            found += [f"{name} is {'gone' if name in there else 'new'}" for name in there.keys() ^ here.keys()]
            for name in there.keys() & here.keys():
                found += [f"{name}: {line}" for line in changes(there[name], here[name])]
        elif key in ("length", "samples"):
            found.append(
                f"{here:,} samples, and there were {there:,}" if there and here else f"{there} -> {here} samples"
            )
        else:
            found.append(f"{key} {there} -> {here}")
    return found


def _of_files(before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        yield "files are new" if not before else "files are gone"
        return
    if "digest" in before or "digest" in now:
        count, here = before.get("count", len(before)), now.get("count", len(now))
        yield f"{here:,} files, and there were {count:,}" if count != here else "the content of some file is another"
        return
    gone, new = [n for n in before if n not in now], [n for n in now if n not in before]
    renamed = [(old, name) for old in gone for name in new if before[old] == now[name]]
    for old, name in renamed[:_NAMED]:
        yield f"{old} is called {name} now"
    yield from _listed("is new", [name for name in new if name not in {name for _, name in renamed}])
    yield from _listed("is gone", [old for old in gone if old not in {old for old, _ in renamed}])
    yield from _listed("has another content", [n for n in before if n in now and before[n] != now[n]])


def _listed(what: str, names: list[str]) -> Iterator[str]:
    yield from (f"{name} {what}" for name in names[:_NAMED])
    if len(names) > _NAMED:
        yield f"{len(names) - _NAMED} more files: {what}"
