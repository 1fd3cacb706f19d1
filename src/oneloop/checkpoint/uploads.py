"""The uploads of a writing process to a mirror."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from xxhash import xxh3_64_digest

from oneloop.basics.bucket import BLOCK, Bucket
from oneloop.checkpoint.lease import Lease, Taken
from oneloop.checkpoint.mirror import (
    BASE,
    CHECKPOINTS,
    FILES,
    FINAL,
    OURS,
    Damaged,
    folder_of,
    manifest_at,
    steps_in,
)
from oneloop.checkpoint.store import (
    MANIFEST,
    Keep,
    Store,
    manifest_of,
    read_manifest,
    signed,
    step_of,
)
from oneloop.checkpoint.writer import SaveRequest, gathered, padded

_PAUSE = 0.3  # seconds between two looks for the shards of other ranks
_BACKOFF = (10.0, 600.0)  # least and most seconds until a failed upload is tried again


class Uploads:
    """The uploads of one process; methods raise OSError. ``to``: the mirror's ``address``, the
    ``run`` folder, the ``limit`` in bytes per second (0: none), ``counts`` (checkpoints are written
    only there), the run's ``lease``, and ``owns`` (this process renews it, and copies). ``news``
    reports the newest ``step`` there, or an ``error``."""

    def __init__(self, to: Mapping[str, Any], news: Callable[..., None]) -> None:
        self.bucket, self.run, self._news = (
            Bucket(to["address"], limit=to["limit"]),
            Path(to["run"]),
            news,
        )
        self.lease, self._request = (
            Lease(self.bucket, *to["lease"]),
            SaveRequest("", 0, 0, 0, 0, "", 0),
        )
        self._check: Callable[[], None] = self.lease.check if to["owns"] else lambda: None
        self.counts, self._delay, self._not_before = bool(to["counts"]), _BACKOFF[0], 0.0
        # beginnings of the names of the objects of each folder
        self._used = dict[str, tuple[str, ...]]()
        self._sent = dict[str, bytes | None]()  # checksums of the files there
        # the newest step there; those that were written again
        self._newest, self._mended = 0, set[int]()
        self._lock, self._wanted = threading.Lock(), threading.Event()
        if to["owns"]:
            taken = lambda error: news(error=str(error), taken=True)  # noqa: E731
            threading.Thread(target=self.lease.keep, args=[taken], daemon=True).start()
            threading.Thread(target=self._follow, daemon=True).start()

    def save(self, request: SaveRequest, data: memoryview, cancelled: Callable[[], bool]) -> None:
        """Write this rank's files of a checkpoint, as :func:`oneloop.checkpoint.writer.write` does
        to a disk."""
        folder, head, self._request = folder_of(request.step), padded(request.header), request
        draft, shard = (
            f"{folder}/{self.lease.number}-{request.attempt}-",
            f"rank-{request.rank:05d}",
        )
        pieces = [head, *(data[at : at + BLOCK] for at in range(0, len(data), BLOCK))]
        try:
            files = {
                f"{shard}.safetensors": self._write(
                    f"{draft}{shard}.safetensors", pieces, request.size
                )
            }
            if request.rank:
                self.bucket.put(
                    f"{draft}{shard}.json", json.dumps(files[f"{shard}.safetensors"]).encode()
                )
                return
            files["state.json"] = self._write(
                f"{draft}state.json", [json.dumps(request.state, indent=1).encode()]
            )

            def names() -> list[str]:
                sizes = self.bucket.sizes(folder)
                return [f"{folder}/{name}".removeprefix(draft) for name in sizes]

            files |= gathered(
                names, lambda name: self.bucket.get(draft + name), request.ranks, cancelled, _PAUSE
            )
        except OSError as error:
            with suppress(OSError):
                if not isinstance(error, Taken):
                    self.bucket.put(f"{draft}{shard}.failed", b"failed")
            raise
        manifest = manifest_of(request.step, files, request.about, request.tensors)
        self._seal(folder, {**manifest, "attempt": f"{self.lease.number}-{request.attempt}"})
        self._prune()
        self._news(step=request.step)

    def _write(self, name: str, pieces: Iterable[Any], size: int = 0) -> dict[str, Any]:
        def checked() -> Iterator[Any]:
            for piece in pieces:
                self._check()
                yield piece

        self._check()
        return self.bucket.write(name, checked(), size)

    def _seal(self, folder: str, manifest: Mapping[str, Any]) -> None:
        """Write all that a manifest refers to, then the manifest: from now on, the folder
        counts."""
        if base := manifest["about"].get("base"):
            try:
                manifest_at(self.bucket, f"{BASE}/{base['xxh3']}")
            except Damaged:  # or missing
                self._copy(self.run / Path(base["folder"]).name, f"{BASE}/{base['xxh3']}")
        if "step" in manifest:
            self._run_files()
        name, content = f"{folder}/{MANIFEST}", signed(manifest)
        self._objects(folder, manifest)
        self._check()
        try:
            self.bucket.put(name, content, create=True)
        except FileExistsError:
            # else the client has repeated its request: an answer was lost
            if self.bucket.get(name) != content:
                if manifest.get("step", -1) not in [-1, *self._request.bad]:
                    raise
                self._remove([name])  # of a damaged checkpoint, or of earlier final weights
                self.bucket.put(name, content, create=True)
        self._mended.add(manifest.get("step", -1))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._check()
            self.bucket.remove(name)

    def _run_files(self) -> None:
        """Write the files of the run folder that have changed; delete those that it does not have
        any more."""
        for name in FILES:
            content = (self.run / name).read_bytes() if (self.run / name).exists() else None
            if self._sent.get(name, b"") != (
                sent := None if content is None else xxh3_64_digest(content)
            ):
                self._remove([name]) if content is None else self._write(name, [content])
            self._sent[name] = sent

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept, and what incomplete attempts left
        behind."""
        there = [name for name in self.bucket.sizes("") if OURS.fullmatch(name)]
        steps = steps_in(self.bucket, there)
        bad = set(self._request.bad) - self._mended  # they do not count, and are not ours to delete
        kept = Keep(**self._request.keep).among([step for step in steps if step not in bad]) | bad
        kept |= set() if self._request.keep else set(steps)
        self._remove(f"{folder_of(step)}/{MANIFEST}" for step in steps if step not in kept)
        used = tuple(
            name for folder in [FINAL, *map(folder_of, kept)] for name in self._objects(folder)
        )
        self._remove(name for name in there if not name.startswith(used))

    def _objects(self, folder: str, manifest: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        if folder not in self._used or manifest is not None:
            try:
                known = manifest or manifest_at(self.bucket, folder)  # written by an earlier start
                base = f"{BASE}/{(known['about'].get('base') or {}).get('xxh3')}/"
                self._used[folder] = (f"{folder}/{known['attempt']}-", f"{folder}/{MANIFEST}", base)
            except ValueError:
                self._used[folder] = (f"{folder}/",)  # damaged, or of another version
        return self._used[folder]

    def wanted(self, request: SaveRequest) -> None:
        """Start to copy the checkpoints of the run folder, after this save, if no copy is in
        progress."""
        self._request = request
        self._wanted.set()

    def _follow(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            if time.monotonic() >= self._not_before:
                self._copied()

    def _copied(self, *, final: bool | None = None) -> str | None:
        """Copy what the mirror lacks; return the error. ``final``: at the end of the run, with the
        final weights."""
        with self._lock:
            try:
                self._copy_checkpoints()
                self._newest = max(steps_in(self.bucket), default=0)
                if final:
                    self._copy(self.run / FINAL, FINAL)
                    self._prune()
                if final is not None:
                    self._run_files()
            except Exception as error:
                self._not_before, self._delay = (
                    time.monotonic() + self._delay,
                    min(2 * self._delay, _BACKOFF[1]),
                )
                self._news(error=str(error), taken=isinstance(error, Taken))
                return str(error)
            self._delay = _BACKOFF[0]
            return None

    def _copy_checkpoints(self) -> None:
        there = set(steps_in(self.bucket)) - (set(self._request.bad) - self._mended)
        for path in reversed([] if self.counts else Store(self.run / CHECKPOINTS).sealed()):
            if step_of(path) not in there:
                try:
                    self._copy(path, f"{CHECKPOINTS}/{path.name}")
                except FileNotFoundError:
                    if path.exists():
                        raise
                    continue  # deleted meanwhile, because there are newer ones
                self._prune()
                self._news(step=step_of(path))

    def _copy(self, folder: Path, remote: str) -> None:
        manifest, attempt = read_manifest(folder), f"{self.lease.number}-{uuid4().hex[:8]}"
        files = manifest["files"]
        # open files stay readable if the checkpoint is deleted meanwhile
        with ExitStack() as stack:
            streams = {name: stack.enter_context((folder / name).open("rb")) for name in files}
            for name, stream in streams.items():
                blocks = iter(lambda stream=stream: stream.read(BLOCK), b"")  # type: ignore[misc]
                entry = self._write(
                    f"{remote}/{attempt}-{name}", blocks, os.fstat(stream.fileno()).st_size
                )
                if entry["xxh3"] != files[name]["xxh3"]:
                    raise OSError(f"{folder / name} is damaged")
                files[name] = entry
        self._seal(remote, {**manifest, "attempt": attempt})

    def end(self, *, final: bool) -> dict[str, Any]:
        """Write what the mirror lacks, also the ``final`` weights. Return the newest step there,
        and the error."""
        return {"error": self._copied(final=final), "mirrored": self._newest}
