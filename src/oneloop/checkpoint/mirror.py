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
import shutil
from collections.abc import Callable, Iterable
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from filelock import FileLock
from xxhash import xxh3_64_hexdigest

from oneloop.basics.bucket import BLOCK, Bucket, check_address, is_address
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import cache_folder
from oneloop.checkpoint.store import (
    MANIFEST,
    Store,
    name_of,
    parsed_manifest,
    problems_of_files,
    read_manifest,
    step_in,
    step_of,
)

CHECKPOINTS, FINAL, BASE = "checkpoints", "final", "base"
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
no_needs: Needs = lambda folder: ()  # noqa: E731

_STEP = re.compile(rf"(?:{CHECKPOINTS}/)?step-(\d{{8,}})/{MANIFEST}")
OURS = re.compile(
    rf"(?:{CHECKPOINTS}/step-\d{{8,}}|{BASE}/[0-9a-f]{{32}}|{FINAL})/(?:\d+-.+|{MANIFEST})"
)
"""names of the objects in its folders"""


class Damaged(ValueError):
    """An error: a checkpoint in a mirror is incomplete, or its content differs from a checksum."""


def folder_of(step: int) -> str:
    return f"{CHECKPOINTS}/{name_of(step)}"


def steps_in(bucket: Bucket, names: Iterable[str] | None = None) -> list[int]:
    """Return the steps of the checkpoints in a mirror (or among ``names``), in ascending order, not
    verified."""
    found = (
        _STEP.fullmatch(name) for name in (bucket.sizes(CHECKPOINTS) if names is None else names)
    )
    return sorted(int(match[1]) for match in found if match)


def manifest_at(bucket: Bucket, folder: str) -> dict[str, Any]:
    """Return the manifest of a folder of a mirror, whose objects are all there. Raises Damaged and
    OSError."""
    try:
        manifest, sizes = parsed_manifest(bucket.get(f"{folder}/{MANIFEST}")), bucket.sizes(folder)
        expected = {
            f"{manifest['attempt']}-{name}": entry["size"]
            for name, entry in manifest["files"].items()
        }
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise Damaged(f"{MANIFEST} is missing, or not of a mirror ({error})") from error
    for name, size in expected.items():
        if sizes.get(name) != size:
            raise Damaged(f"{name}: expected {size} bytes, found {sizes.get(name, 'none')}")
    return manifest


class Copy:
    """A copy of a folder of a mirror at ``path``: sparse files, into which the needed blocks are
    fetched.

    Each block is verified by its checksum. Methods raise OSError and Damaged."""

    def __init__(self, bucket: Bucket, folder: str, path: Path) -> None:
        self.bucket, self.folder, self.path = bucket, folder, path
        self.manifest = manifest_at(bucket, folder)

    def begin(self) -> None:
        """Create the folder, with everything except the tensors: manifest, headers, other files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for name, entry in self.manifest["files"].items():
            file, whole = self.path / name, entry["size"]
            file.touch()
            os.truncate(file, whole)
            if name.endswith(".safetensors"):
                self.fill([(name, 0)])
                with file.open("rb") as stream:
                    whole = 8 + int.from_bytes(stream.read(8), "little")
            self.fill(self.blocks([(file, 0, whole)]))
        (self.path / MANIFEST).write_bytes(self.bucket.get(f"{self.folder}/{MANIFEST}"))

    def blocks(self, spans: Iterable[Span]) -> list[Block]:
        """Return the blocks that cover these spans, without those in other folders."""
        own = [span for span in spans if span[0].parent == self.path]
        return sorted(
            {
                (file.name, at)
                for file, start, end in own
                for at in range(start // BLOCK, -(-end // BLOCK))
            }
        )

    def fill(self, blocks: Iterable[Block]) -> None:
        """Fetch these blocks, in order of their files."""
        for name, group in groupby(blocks, key=lambda block: block[0]):
            entry, remote = (
                self.manifest["files"][name],
                f"{self.folder}/{self.manifest['attempt']}-{name}",
            )
            places = [
                (block * BLOCK, min(entry["size"], (block + 1) * BLOCK)) for _, block in group
            ]
            with (self.path / name).open("r+b") as stream:
                for offset, data in self.bucket.read(remote, places):
                    if xxh3_64_hexdigest(data) != entry["blocks"][offset // BLOCK]:
                        raise Damaged(f"{name}: the checksum of the block at {offset} differs")
                    os.pwrite(stream.fileno(), data, offset)

    def whole(self) -> None:
        """Fetch everything."""
        self.begin()
        self.fill(
            self.blocks(
                (self.path / name, 0, entry["size"])
                for name, entry in self.manifest["files"].items()
            )
        )


def fetch_base(bucket: Bucket, manifest: dict[str, Any], run: Path) -> None:
    """Fetch the frozen parameters that a checkpoint refers to, unless the run folder has them."""
    if base := manifest["about"].get("base"):
        folder = run / Path(base["folder"]).name
        own = [] if problems_of_files(folder) else read_manifest(folder)["files"].values()
        if base["xxh3"] not in [entry["xxh3"] for entry in own]:
            Copy(bucket, f"{BASE}/{base['xxh3']}", folder).whole()


def fetch_files(bucket: Bucket, run: Path) -> None:
    """Fetch the files of the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        try:
            (run / name).write_bytes(bucket.get(name))
        except FileNotFoundError:
            (run / name).unlink(missing_ok=True)


def local_run(run: str | Path) -> Path:
    """Return a run folder; of a mirror, a copy in the cache, for which :func:`complete` fetches.
    Raises BadInput."""
    if not is_address(run):
        return Path(run)
    check_address(str(run), "RUN")
    folder = cache_folder() / "mirrors" / str(run).replace("://", "/")
    try:
        bucket = Bucket(str(run))
        there = [
            *map(folder_of, steps_in(bucket)),
            *([FINAL] if MANIFEST in bucket.sizes(FINAL) else []),
        ]
        if not there:
            raise BadInput(
                f"{run} holds no checkpoint of a run (looked for {CHECKPOINTS}/step-…/{MANIFEST})"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            fetch_files(bucket, folder)
            (folder / ADDRESS).write_text(bucket.address)
            for path in [folder / FINAL, *(folder / CHECKPOINTS).glob("*")]:
                if path.relative_to(folder).as_posix() not in there:
                    shutil.rmtree(path, ignore_errors=True)
            for name in there:
                manifest = bucket.get(f"{name}/{MANIFEST}")
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / MANIFEST).write_bytes(manifest)
    except OSError as error:
        raise BadInput(
            f"the mirror cannot be read: {error}; check address, credentials and network"
        ) from error
    return folder


def local_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint (or of a run), which is fetched from a mirror. Raises
    BadInput."""
    run, _, step = path.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    if not is_address(path) or not run:
        return local_run(path).expanduser()
    folder = local_run(run) / CHECKPOINTS / step
    complete(folder)
    return folder


def complete(path: Path, *, again: bool = False) -> None:
    """Fetch a checkpoint, or ``final``, in a copy of a mirror, if incomplete or ``again``. Raises
    BadInput."""
    run = path.parent if path.name == FINAL else path.parent.parent
    if not (run / ADDRESS).exists():
        return
    try:
        with FileLock(run / ".lock"):
            copy = Copy(Bucket((run / ADDRESS).read_text()), path.relative_to(run).as_posix(), path)
            if again or problems_of_files(path):
                copy.whole()
            fetch_base(copy.bucket, copy.manifest, run)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path.name} of the mirror cannot be fetched: {error}; choose another checkpoint"
        ) from error


class Fetcher:
    """Fetches checkpoints of a mirror into hidden folders of a run's ``store``: each block once per
    host. ``gather`` gathers a value of all ranks, ``leader`` is the first rank of this host, and
    ``say`` reports damaged checkpoints."""

    def __init__(
        self,
        bucket: Bucket,
        store: Store,
        *,
        rank: int,
        leader: int,
        gather: Callable[..., Any],
        say: Callable[..., None],
    ) -> None:
        self._bucket, self._store, self._rank, self._leader = bucket, store, rank, leader
        self._gather, self._say = gather, say
        self.damaged: list[int] = []  # steps of damaged checkpoints in the mirror

    def source(self, path: Path) -> str:
        """Return where a checkpoint comes from."""
        step = step_in(path.name[1:].partition(".")[0])
        return f"{self._bucket.address}/{folder_of(step)}" if step is not None else str(path)

    def _agreed(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks. If one fails, raise its error on all: Damaged only if
        none has another."""
        mine: tuple[Any, ValueError | None]
        try:
            mine = (act(), None)
        except (OSError, ValueError) as error:
            kind = Damaged if isinstance(error, Damaged) else ValueError
            mine = (None, kind(f"{error} (rank {self._rank})"))
        every = self._gather(mine)
        if wrong := [error for _, error in every if error is not None]:
            raise min(wrong, key=lambda error: isinstance(error, Damaged))
        return [result for result, _ in every]

    def newest(self, own: Path | None, needs: Needs) -> Path | None:
        """Return a copy of the newest intact checkpoint after ``own``, with what the ranks of this
        host need; None if there is none. Log damaged ones. Collective. Raises ValueError if only
        damaged ones are there."""
        steps = self.later(step_of(own) if own is not None else -1)
        for step in reversed(steps):
            try:
                return self.fetch(step, needs)
            except Damaged as error:
                self.damaged.append(step)
                if self._rank == 0:
                    place = f"{self._bucket.address}/{folder_of(step)}"
                    self._say(f"checkpoint {place} cannot be used, and was skipped: {error}")
        if steps and own is None:
            raise ValueError(
                f"no intact checkpoint is left in {self._bucket.address}; choose another address"
            )
        return None

    def later(self, than: int) -> list[int]:
        """Return the steps in the mirror after a step, except damaged ones. Collective."""
        steps = self._agreed(lambda: steps_in(self._bucket) if self._rank == 0 else [])[0]
        return [step for step in steps if step > than and step not in self.damaged]

    def fetch(self, step: int, needs: Needs) -> Path:
        """Return a copy of a checkpoint. Collective. Raises Damaged; ValueError if a rank cannot
        read it."""
        path = self._store.root / f".{name_of(step)}.{self._leader}.fetched"
        copies: list[Copy] = []

        def begin() -> None:
            copies.append(Copy(self._bucket, folder_of(step), path))
            if self._rank == self._leader:
                self._store.sweep(f".{self._leader}.fetched")
                copies[0].begin()
                fetch_base(self._bucket, copies[0].manifest, self._store.root.parent)

        self._agreed(begin)
        listed = self._agreed(lambda: (self._leader, copies[0].blocks(needs(path))))
        on_host = [blocks for leader, blocks in listed if leader == self._leader]
        mine = sorted({*chain(*on_host)})[self._rank - self._leader :: len(on_host)]
        self._agreed(lambda: copies[0].fill(mine))
        return path
