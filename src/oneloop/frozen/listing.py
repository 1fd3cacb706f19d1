"""Where stores of frozen outputs are, and which there are. Needs no torch."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneloop.basics.bucket import Bucket, check_address, is_address
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import cache_folder, intact, one_line, printable
from oneloop.basics.untrusted import damaged, delete, parsed_json, read_bytes

ABOUT = "about.json"  # what a store holds, for people
_KEY = re.compile(r"[0-9a-f]{32}")


def local_root(address: str | None) -> Path:
    """Return the folder of all stores on this host.

    Raise BadInput if an address is not one of a bucket.
    """
    if address is None:
        return cache_folder() / "frozen"
    if not is_address(address):
        return Path(address).expanduser()
    check_address(address, "task.store")
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    return cache_folder() / "frozen"


def in_bucket(address: str | None) -> bool:
    """Return whether the stores at this address are in a bucket."""
    return is_address(address) and not str(address).startswith("file://")


@dataclass(frozen=True)
class Listed:
    """A store that was found.

    Args:
        key: its name, 32 hexadecimal digits.
        about: what it holds; None: its description is missing or damaged.
        files: number of its files of ranges.
        size: bytes of all its files.
    """

    key: str
    about: dict[str, Any] | None
    files: int
    size: int

    @property
    def line(self) -> str:
        """One line about the store."""
        line = f"{self.key[:12]}  {self.size / 1e6:10,.1f} MB  "
        if self.about is None:
            return f"{line}its description is missing or damaged"
        ranges = int(self.about["ranges"])
        role = one_line(printable(self.about["parts"]["role"]))
        line += f"{role}, {int(self.about['documents']):,} documents"
        if self.files < ranges:
            line += f", {self.files} of {ranges} ranges"
        return line


def stores(address: str | None) -> list[Listed]:
    """Return the stores at an address (None: in the cache of this host), sorted by key."""
    sizes: dict[str, dict[str, int]] = {}
    read: Callable[[str], bytes]
    if in_bucket(address):
        bucket = Bucket(str(address))
        for name, size in bucket.sizes("").items():
            key, _, file = name.partition("/")
            sizes.setdefault(key, {})[file] = size
        read = bucket.get
    else:
        root = local_root(address)
        for folder in root.iterdir() if root.is_dir() else ():
            if folder.is_dir() and not folder.is_symlink():
                sizes[folder.name] = {file.name: file.lstat().st_size for file in folder.iterdir()}

        def read(name: str) -> bytes:
            return read_bytes(root / name)

    found = []
    for key in sorted(sizes):
        if _KEY.fullmatch(key):
            files = sizes[key]
            count = sum(name.endswith(".bin") for name in files)
            found.append(Listed(key, _about(read, key), count, sum(files.values())))
    return found


def _about(read: Callable[[str], bytes], key: str) -> dict[str, Any] | None:
    """Return the description of a store; None if it is missing or damaged."""
    try:
        with damaged(ABOUT):
            about: dict[str, Any] = parsed_json(read(f"{key}/{ABOUT}"))
            numbers = [about["documents"], about["ranges"], about["bytes"]]
            whole = intact(about) and about["parts"]["role"] and min(map(int, numbers)) >= 0
    except (OSError, ValueError):
        return None
    return about if whole else None


def chosen(found: Sequence[Listed], keys: Sequence[str], where: object) -> Iterator[Listed]:
    """Yield the stores whose keys begin with one of these; ``all`` means all of them.

    Raise BadInput if a key matches no store or several; ``where`` names their place.
    """
    if not keys:
        raise BadInput("--delete names no store; give the beginning of a key, or all")
    for key in keys:
        matches = [store for store in found if key == "all" or store.key.startswith(key)]
        if not matches or (key != "all" and len(matches) > 1):
            raise BadInput(
                f"--delete {key} matches {len(matches)} of {len(found)} stores in {where}, and "
                "nothing was deleted; give the beginning of one key that oneloop frozen lists, or "
                "the ADDRESS of other stores"
            )
        yield from matches


def remove(store: Listed, address: str | None) -> None:
    """Delete a store: in the bucket, or on this host."""
    if not in_bucket(address):
        root = local_root(address)
        delete(root / store.key, inside=root)
        return
    bucket = Bucket(str(address))
    for name in bucket.sizes(store.key):
        bucket.remove(f"{store.key}/{name}")


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
