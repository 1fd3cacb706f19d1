"""The layout of a mirror, and copies of its folders on this machine.

    owner/00000003.json             the owner (:mod:`oneloop.checkpoint.lease`)
    checkpoints/step-00000500/
      3-12-rank-00000.safetensors   written by attempt 12 of owner 3
      MANIFEST.json                 names the attempt; written last, and only if it is new
    base/CHECKSUM/…, final/…        frozen parameters and final weights, in the same way
    recipe.yaml, metrics.jsonl, …   files of the run folder

A manifest is that of the run folder, with the ``attempt`` and, for each file, the checksums of its
``blocks``.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

from filelock import FileLock
from xxhash import xxh3_64_hexdigest

from oneloop.basics.bucket import (
    BLOCK,
    Bucket,
    StoredObject,
    StoreError,
    check_address,
    is_address,
)
from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import cache_folder, writing
from oneloop.basics.untrusted import damaged, delete, read_bytes
from oneloop.checkpoint.manifest import (
    MANIFEST,
    base_in,
    check_header_length,
    parsed_manifest,
    read_manifest,
    signed,
)
from oneloop.checkpoint.store import name_of, problems_of_files, step_in

CHECKPOINTS = "checkpoints"
FINAL = "final"
BASE = "base"
FILES = (
    "summary.json",
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "examples.json",
    "report.html",
)
"""files of the run folder that a mirror holds"""
ADDRESS = ".address"  # file of a copy in the cache, with the address of the mirror
# a file of a copy, and the first and the last byte (exclusive) that are needed
Span = tuple[Path, int, int]
Block = tuple[str, int]  # name of a file, and number of the block
Needs = Callable[[Path], Iterable[Span]]


def no_needs(folder: Path) -> Iterable[Span]:
    """Return that no bytes of a checkpoint are needed."""
    return ()


_STEP = re.compile(rf"(?:{CHECKPOINTS}/)?step-([0-9]{{8,15}})/{MANIFEST}")
OURS = re.compile(
    rf"(?:{CHECKPOINTS}/step-[0-9]{{8,15}}|{BASE}/[0-9a-f]{{32}}|{FINAL})/([0-9]+-.+|{MANIFEST})"
)
"""names of the objects in its folders"""


class Damaged(ValueError):
    """An error: a checkpoint in a mirror is incomplete, or its content differs from a checksum."""


class FrozenBase(NamedTuple):
    """The frozen parameters that a checkpoint refers to."""

    folder: str  # its name in the run folder
    xxh3: str  # checksum of the file; names its folder in a mirror


@dataclass(frozen=True)
class MirrorManifest:
    """The manifest of a folder in a mirror; ``content`` is its JSON, without the checksum."""

    content: Mapping[str, Any]

    @property
    def attempt(self) -> str:
        """The beginning of the names of its objects: ``OWNER-ATTEMPT``.

        Raises ValueError if the manifest is not of a mirror.
        """
        if "attempt" not in self.content:
            raise ValueError(f"{MANIFEST} is not of a mirror: it names no attempt")
        return str(self.content["attempt"])

    @property
    def step(self) -> int | None:
        """The step of a checkpoint; None for frozen parameters and final weights."""
        return self.content.get("step")

    @property
    def base(self) -> FrozenBase | None:
        """The frozen parameters that a checkpoint refers to; None for other folders."""
        base = base_in(self.content)
        return None if base is None else FrozenBase(base["folder"], base["xxh3"])

    @cached_property
    def files(self) -> dict[str, StoredObject]:
        """The size and the checksums of its files, by their names in the run folder."""
        found = {}
        for name, entry in self.content["files"].items():
            # The manifest of a folder on the disk lists no blocks.
            blocks = [*entry.get("blocks", ())]
            found[name] = StoredObject(int(entry["size"]), entry["xxh3"], blocks)
        return found


def folder_of(step: int) -> str:
    """Return the folder of a checkpoint in a mirror."""
    return f"{CHECKPOINTS}/{name_of(step)}"


def steps_in(bucket: Bucket, names: Iterable[str] | None = None) -> list[int]:
    """Return the steps of the checkpoints in a mirror (or among ``names``), in ascending order.

    The checkpoints are not verified.
    """
    if names is None:
        names = bucket.sizes(CHECKPOINTS)
    matches = map(_STEP.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match)


def manifest_at(bucket: Bucket, folder: str) -> MirrorManifest:
    """Return the manifest of a folder of a mirror, after checking that all its objects are there.

    Raises:
        Damaged: if the manifest, or one of its objects, is missing or has another size.
        OSError: if the mirror cannot be read.
    """
    try:
        with damaged(MANIFEST):
            manifest = MirrorManifest(parsed_manifest(bucket.get(f"{folder}/{MANIFEST}")))
            sizes = bucket.sizes(folder)
            expected = {f"{manifest.attempt}-{name}": file for name, file in manifest.files.items()}
    except (FileNotFoundError, ValueError) as error:
        raise Damaged(f"{MANIFEST} is missing, or not of a mirror ({error})") from error
    if manifest.step != step_in(folder.rpartition("/")[2]):
        raise Damaged(f"its {MANIFEST} belongs to step {manifest.step}")
    for name, file in expected.items():
        if sizes.get(name) != file.size:
            raise Damaged(f"{name}: expected {file.size} bytes, found {sizes.get(name, 'none')}")
        if len(file.blocks) != -(-file.size // BLOCK):
            raise Damaged(f"{name}: {len(file.blocks)} checksums do not cover {file.size} bytes")
    return manifest


class Copy:
    """A copy of a folder of a mirror: sparse files, into which the needed blocks are fetched.

    Each block is verified by its checksum. Methods raise OSError and Damaged.

    Args:
        bucket: the mirror.
        folder: the name of the folder there.
        path: the folder of the copy.
    """

    def __init__(self, bucket: Bucket, folder: str, path: Path) -> None:
        self.bucket = bucket
        self.folder = folder
        self.path = path
        self.manifest = manifest_at(bucket, folder)

    def begin(self) -> None:
        """Create the folder, with everything except the tensors: manifest, headers, other files."""
        delete(self.path, inside=self.path.parent)
        self.path.mkdir(parents=True)
        for name, entry in self.manifest.files.items():
            # A sparse file takes no space until its blocks are fetched.
            file = self.path / name
            file.parent.mkdir(exist_ok=True)  # a file may be in a folder inside this one
            file.touch()
            os.truncate(file, entry.size)

            # Fetch the header of a file with tensors; its length is in the first block.
            needed = entry.size
            if name.endswith(".safetensors"):
                self.fill(self.blocks([(file, 0, min(8, entry.size))]))
                with file.open("rb") as stream:
                    length = int.from_bytes(stream.read(8), "little")
                try:
                    check_header_length(length, entry.size - 8)
                except ValueError as error:
                    raise Damaged(f"{name}: {error}") from error
                needed = 8 + length
            self.fill(self.blocks([(file, 0, needed)]))
        (self.path / MANIFEST).write_bytes(signed(self.manifest.content))

    def blocks(self, spans: Iterable[Span]) -> list[Block]:
        """Return the blocks that cover these spans, without those in other folders."""
        covering: set[Block] = set()
        for file, start, end in spans:
            if file.is_relative_to(self.path):
                name = file.relative_to(self.path).as_posix()
                numbers = range(start // BLOCK, -(-end // BLOCK))
                covering.update((name, number) for number in numbers)
        return sorted(covering)

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fetch these blocks, in order of their files."""
        for name, group in groupby(blocks, key=lambda block: block[0]):
            entry = self.manifest.files[name]
            remote = f"{self.folder}/{self.manifest.attempt}-{name}"
            spans = []  # of bytes
            for _, number in group:
                spans.append((number * BLOCK, min(entry.size, (number + 1) * BLOCK)))

            with (self.path / name).open("r+b") as stream:
                for offset, data in self.bucket.read(remote, spans):
                    if xxh3_64_hexdigest(data) != entry.blocks[offset // BLOCK]:
                        raise Damaged(f"{name}: the checksum of the block at {offset} differs")
                    stream.seek(offset)
                    stream.write(data)

    def whole(self) -> None:
        """Fetch everything, if the disk has room for it."""
        size = sum(entry.size for entry in self.manifest.files.values())
        there = next(path for path in self.path.parents if path.exists())
        free = disk_usage(there).free
        if size > free:
            raise OSError(f"{size:,} bytes are needed, and {free:,} are free")
        self.begin()
        files = self.manifest.files.items()
        self.fill(self.blocks((self.path / name, 0, entry.size) for name, entry in files))


def fetch_base(bucket: Bucket, manifest: MirrorManifest, run: Path) -> None:
    """Fetch the frozen parameters that a checkpoint refers to, unless the run folder has them."""
    base = manifest.base
    if base is None:
        return
    folder = run / base.folder
    own = []
    if not problems_of_files(folder):
        own = [entry["xxh3"] for entry in read_manifest(folder)["files"].values()]
    if base.xxh3 not in own:
        Copy(bucket, f"{BASE}/{base.xxh3}", folder).whole()


def fetch_files(bucket: Bucket, run: Path) -> None:
    """Fetch the files of the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        delete(run / name, inside=run)
        with suppress(FileNotFoundError):
            bucket.fetch(name, run / name)


def local_run(run: str | Path) -> Path:
    """Return a run folder; of a mirror, a copy in the cache, for which :func:`complete` fetches.
    Raises BadInput."""
    if not is_address(run):
        return Path(run)
    check_address(str(run), "RUN")
    folder = _copies() / str(run).replace("://", "/")
    with readable(str(run), folder):
        # List the folders of the mirror.
        bucket = Bucket(str(run))
        there = [folder_of(step) for step in steps_in(bucket)]
        if MANIFEST in bucket.sizes(FINAL):
            there.append(FINAL)
        if not there:
            raise BadInput(
                f"{run} holds no checkpoint of a run (looked for {CHECKPOINTS}/step-…/{MANIFEST})"
            )

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            # Fetch the small files.
            fetch_files(bucket, folder)
            (folder / ADDRESS).write_text(bucket.address)

            # Delete what the mirror does not hold any more.
            for path in [folder / FINAL, *(folder / CHECKPOINTS).glob("*")]:
                if path.relative_to(folder).as_posix() not in there:
                    delete(path, inside=path.parent)

            # Of each folder, fetch only the manifest.
            for name in there:
                try:
                    manifest = bucket.get(f"{name}/{MANIFEST}")
                except ValueError:  # too long to be one
                    continue
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / MANIFEST).write_bytes(manifest)
    return folder


@contextmanager
def readable(address: str, folder: Path) -> Iterator[None]:
    """Raise errors while a mirror is copied to a folder as Unavailable, or as BadInput."""
    try:
        remedy = "make room, or set ONELOOP_CACHE to another folder"
        with writing(f"the copy of {address} in {folder}", remedy):
            yield
    except StoreError as error:
        raise unreadable(address, error) from error


def unreadable(address: str, error: StoreError) -> BadInput | Unavailable:
    """Return the error that ends a program which cannot read a mirror."""
    if error.temporary:
        return Unavailable(
            f"the mirror {address} cannot be read now: {error}; check the network, and start the "
            "same command again"
        )
    return BadInput(f"the mirror {address} cannot be read: {error}; check address and credentials")


def local_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint (or of a run), which is fetched from a mirror.

    Raises BadInput.
    """
    run, _, step = path.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    if not is_address(path) or not run:
        return local_run(path).expanduser()
    folder = local_run(run) / CHECKPOINTS / step
    complete(folder)
    return folder


def address_of(run: Path) -> str | None:
    """Return the address of the mirror of which a run folder is a copy in the cache, or None."""
    file = run / ADDRESS
    if not file.is_file() or not file.resolve().is_relative_to(_copies().resolve()):
        return None
    return read_bytes(file).decode()


def _copies() -> Path:
    """Return the folder for copies of mirrors in the cache."""
    return cache_folder() / "mirrors"


def complete(path: Path, *, again: bool = False) -> None:
    """Fetch a checkpoint, or ``final``, in a copy of a mirror, if incomplete or ``again``.

    Raises BadInput.
    """
    run = path.parent if path.name == FINAL else path.parent.parent
    address = address_of(run)
    if address is None:
        return
    try:
        with readable(address, run), FileLock(run / ".lock"):
            bucket = Bucket(address)
            copy = Copy(bucket, path.relative_to(run).as_posix(), path)
            if again or problems_of_files(path):
                copy.whole()
            fetch_base(bucket, copy.manifest, run)
    except Damaged as error:
        raise BadInput(
            f"{path.name} of the mirror cannot be fetched: {error}; choose another checkpoint"
        ) from error
