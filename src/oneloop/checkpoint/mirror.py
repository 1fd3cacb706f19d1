"""The layout of a mirror, and copies of its folders on this machine.

    owner/00000003.json                                    the owner (:mod:`oneloop.checkpoint.lease`)
    checkpoints/step-00000500/3-12-rank-00000.safetensors  written by attempt 12 of owner 3
    checkpoints/step-00000500/MANIFEST.json                names the attempt; written last, and only if it is new
    base/CHECKSUM/…, final/…                               frozen parameters and final weights, in the same way
    recipe.yaml, metrics.jsonl, …                          files of the run folder

A manifest is that of the run folder, with the ``attempt`` and, for each file, the checksums of its ``blocks``.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from oneloop.basics.bucket import BLOCK, Bucket
from oneloop.checkpoint.store import MANIFEST, name_of, parsed_manifest, problems_of_files, step_in

CHECKPOINTS, FINAL, BASE = "checkpoints", "final", "base"
FILES = ("summary.json", "recipe.yaml", "environment.json", "metrics.jsonl", "examples.json", "report.html")
"""files of the run folder that a mirror holds"""
Span = tuple[Path, int, int]  # a file of a copy, and the first and the last byte (exclusive) that are needed


def folder_of(step: int) -> str:
    return f"{CHECKPOINTS}/{name_of(step)}"


def steps_in(bucket: Bucket) -> list[int]:
    """Return the steps of the checkpoints in a mirror, in ascending order; :func:`manifest_at` verifies one."""
    folders = [name.removesuffix(f"/{MANIFEST}") for name in bucket.sizes(CHECKPOINTS) if name.endswith(MANIFEST)]
    return sorted(step for folder in folders if (step := step_in(folder)) is not None)


def manifest_at(bucket: Bucket, folder: str) -> dict[str, Any]:
    """Return the manifest of a folder of a mirror, whose objects are all there. Raises ValueError if it is damaged."""
    try:
        manifest = parsed_manifest(bucket.get(f"{folder}/{MANIFEST}"))
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    sizes = bucket.sizes(folder)
    for name, entry in manifest["files"].items():
        if (size := sizes.get(f"{manifest['attempt']}-{name}")) != entry["size"]:
            raise ValueError(f"{name}: expected {entry['size']} bytes, found {size or 'none'}")
    return manifest


class Copy:
    """A copy of a folder of a mirror at ``path``: sparse files, into which the needed blocks are fetched.

    Each block is verified by its checksum. Methods raise OSError, and ValueError if something is damaged."""

    def __init__(self, bucket: Bucket, folder: str, path: Path) -> None:
        self.bucket, self.folder, self.path = bucket, folder, path
        self.manifest = manifest_at(bucket, folder)
        self._held = set[tuple[str, int]]()

    def begin(self) -> None:
        """Create the folder, with everything except the tensors: manifest, headers, other files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for name, entry in self.manifest["files"].items():
            file, whole = self.path / name, entry["size"]
            file.touch()
            os.truncate(file, whole)
            if name.endswith(".safetensors"):
                self.fill([(file, 0, 8)])
                with file.open("rb") as stream:
                    whole = 8 + int.from_bytes(stream.read(8), "little")
            self.fill([(file, 0, whole)])
        (self.path / MANIFEST).write_bytes(self.bucket.get(f"{self.folder}/{MANIFEST}"))

    def fill(self, spans: Iterable[Span]) -> None:
        """Fetch the blocks of these spans, except those that this object has fetched; ignore files of other folders."""
        needed = dict[str, set[int]]()
        for file, start, end in spans:
            if file.parent == self.path:
                needed.setdefault(file.name, set()).update(range(start // BLOCK, -(-end // BLOCK)))
        for name, blocks in needed.items():
            entry = self.manifest["files"][name]
            missing = sorted(block for block in blocks if (name, block) not in self._held)
            places = [(block * BLOCK, min(entry["size"], (block + 1) * BLOCK)) for block in missing]
            with (self.path / name).open("r+b") as stream:
                for offset, data in self.bucket.read(f"{self.folder}/{self.manifest['attempt']}-{name}", places):
                    if xxh3_64_hexdigest(data) != entry["blocks"][offset // BLOCK]:
                        raise ValueError(f"{name}: the checksum of the block at {offset} differs")
                    os.pwrite(stream.fileno(), data, offset)
            self._held |= {(name, block) for block in missing}

    def whole(self) -> None:
        """Fetch everything."""
        self.begin()
        self.fill((self.path / name, 0, entry["size"]) for name, entry in self.manifest["files"].items())


def fetch_base(bucket: Bucket, manifest: dict[str, Any], run: Path) -> None:
    """Fetch the frozen parameters that a checkpoint refers to, unless the run folder has them."""
    if base := manifest["about"].get("base"):
        folder = run / Path(base["folder"]).name
        if problems_of_files(folder):
            Copy(bucket, f"{BASE}/{base['xxh3']}", folder).whole()


def fetch_files(bucket: Bucket, run: Path) -> None:
    """Fetch the files of the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        with suppress(FileNotFoundError):
            (run / name).write_bytes(bucket.get(name))
