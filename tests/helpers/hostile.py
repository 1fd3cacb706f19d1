"""Hostile values in the files of a run: seeded, in any field, with checksums that fit again."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from xxhash import xxh3_128_hexdigest

from oneloop.basics.files import vouched
from oneloop.checkpoint.manifest import MANIFEST, signed

DEEP = json.loads("[" * 900 + "]" * 900)
OUTSIDE = ["..", ".", "", "/", "/etc/passwd", "../../x", "a/../../b", "a\0b", "n" * 300]
NAMES = [*OUTSIDE, "a\nb", "a\\b"]
VALUES: list[Any] = [
    *NAMES,
    "\ud800",
    "../outside",
    "checkpoints",
    "\x1b[2J",
    "x" * 100_000,
    None,
    True,
    0,
    -1,
    1 << 62,
    1 << 64,
    10**400,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    [],
    [None],
    [[]],
    {},
    {"..": {}},
    {"a": None},
    DEEP,
    list(range(20_000)),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a value."""
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))[:3]
    else:
        return
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(value: Any, chance: random.Random) -> tuple[Any, str]:
    """Return a copy with one hostile change, and a description of the change."""
    path = chance.choice([*places(value)])
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    new = chance.choice(VALUES)
    act = chance.choice(["set", "set", "set", "drop", "rename", "add"])
    if act == "set":
        holder[key] = new
    elif act == "drop":
        del holder[key]
    elif isinstance(holder, list):
        holder.append(new)
    else:
        name = chance.choice(NAMES)
        holder[name] = holder.pop(key) if act == "rename" else new
    return value, f"{act} {path}: {new!r:.40}"


def resign(folder: Path, manifest: dict[str, Any], name: str) -> None:
    """Write the manifest of a folder with the size and the checksums that a file now has."""
    prefix = f"{manifest['attempt']}-" if "attempt" in manifest else ""
    content = (folder / f"{prefix}{name}").read_bytes()
    entry = {"size": len(content), "xxh3": xxh3_128_hexdigest(content)}
    manifest["files"][name] = entry
    (folder / MANIFEST).write_bytes(signed(manifest))


def _manifest(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / MANIFEST).read_bytes())
    content.pop("self")
    return content


def of_manifest(folder: Path, chance: random.Random) -> str:
    """Change the manifest of a folder."""
    content, what = changed(_manifest(folder), chance)
    if isinstance(content, dict):
        (folder / MANIFEST).write_bytes(signed(content))
    return what


def of_state(folder: Path, chance: random.Random) -> str:
    """Change the state of a checkpoint, and vouch for it."""
    manifest = _manifest(folder)
    prefix = f"{manifest['attempt']}-" if "attempt" in manifest else ""
    file = folder / f"{prefix}state.json"
    content, what = changed(json.loads(file.read_bytes()), chance)
    file.write_text(json.dumps(content))
    resign(folder, manifest, "state.json")
    return what


def of_header(folder: Path, chance: random.Random) -> str:
    """Change the header of a file with tensors, and vouch for it."""
    manifest = _manifest(folder)
    names = [name for name in manifest["files"] if name.endswith(".safetensors")]
    name = chance.choice(names)
    prefix = f"{manifest['attempt']}-" if "attempt" in manifest else ""
    file = folder / f"{prefix}{name}"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    if chance.random() < 0.3:
        size = chance.choice([0, 1, 7, len(content), 1 << 31, 1 << 62, (1 << 64) - 1])
        content[:8] = size.to_bytes(8, "little")
        what = f"length {size}"
    else:
        header, what = changed(json.loads(content[8 : 8 + length]), chance)
        text = json.dumps(header).encode()
        content[: 8 + length] = len(text).to_bytes(8, "little") + text
    file.write_bytes(content)
    resign(folder, manifest, name)
    return what


def of_json(file: Path, chance: random.Random) -> str:
    """Change a JSON file, or replace it by something else."""
    if chance.random() < 0.15:
        return _of_bytes(file, chance)
    content, what = changed(json.loads(file.read_bytes()), chance)
    if isinstance(content, dict) and "checksum" in content:
        content = vouched({name: v for name, v in content.items() if name != "checksum"})
    file.write_text(json.dumps(content))
    return what


def of_yaml(file: Path, chance: random.Random) -> str:
    """Change a YAML file, or replace it by something else."""
    if chance.random() < 0.15:
        return _of_bytes(file, chance)
    content, what = changed(yaml.safe_load(file.read_bytes()), chance)
    file.write_text(json.dumps(content))  # JSON is YAML
    return what


def of_lines(file: Path, chance: random.Random) -> str:
    """Change one line of a file of JSON lines."""
    lines = file.read_bytes().splitlines()
    at = chance.randrange(len(lines))
    content, what = changed(json.loads(lines[at]), chance)
    lines[at] = json.dumps(content).encode()
    file.write_bytes(b"\n".join(lines) + b"\n")
    return what


def _of_bytes(file: Path, chance: random.Random) -> str:
    texts = {
        "nothing": b"",
        "no text": b'{"\xff\xfe": 1}',
        "deep": b"[" * 200_000,
        "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "a list": b"[]",
        "null": b"null",
        "digits": b"9" * 100_000,
    }
    what = chance.choice(sorted(texts))
    file.write_bytes(texts[what])
    return what


class Copies:
    """Hostile copies of a folder: each differs from the right one in one value.

    Args:
        right: the folder, which stays as it is.
        work: replaced by the copies.
        changes: by file or folder relative to it, how that is changed.
        seed: of the changes.
    """

    def __init__(
        self,
        right: Path,
        work: Path,
        changes: dict[str, list[Callable[[Path, random.Random], str]]],
        seed: int,
    ) -> None:
        self.right = right
        self.work = work
        self.changes = changes
        self.chance = random.Random(seed)

    def next(self) -> str:
        """Make the next copy; return what is hostile in it."""
        where = self.chance.choice(sorted(self.changes))
        change = self.chance.choice(self.changes[where])
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.right, self.work, symlinks=True)
        return f"{where}: {change(self.work / where, self.chance)}"


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = (path.stat().st_mode, content)
    return found
