"""The uploads of a writing process to a mirror."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from xxhash import xxh3_64_digest

from oneloop.basics.bucket import BLOCK, Bucket, StoredObject
from oneloop.checkpoint.lease import Lease, Taken
from oneloop.checkpoint.manifest import MANIFEST, manifest_of, read_manifest, signed
from oneloop.checkpoint.mirror import (
    BASE,
    CHECKPOINTS,
    FILES,
    FINAL,
    OURS,
    Damaged,
    FrozenBase,
    MirrorManifest,
    folder_of,
    manifest_at,
    steps_in,
)
from oneloop.checkpoint.save_request import (
    Answer,
    News,
    SaveRequest,
    UploadSettings,
    gathered,
    padded,
)
from oneloop.checkpoint.store import Store, step_of

_PAUSE = 0.3  # seconds between two looks for the shards of other ranks
_LEAST_DELAY = 10.0  # seconds until a failed upload is tried again; doubled at each failure
_MOST_DELAY = 600.0
_UNKNOWN = b""  # in place of a checksum: a file that was not yet compared


class Uploads:
    """The uploads of one process; methods raise OSError.

    Args:
        settings: of the mirror.
        news: receives the newest step there, or an error.
    """

    def __init__(self, settings: UploadSettings, news: Callable[[News], None]) -> None:
        # The connection.
        self.bucket = Bucket(settings.address, limit=settings.limit)
        self.run = Path(settings.run)
        self.counts = settings.counts
        self.lease = Lease(self.bucket, *settings.lease)
        self._owns = settings.owns
        self._news = news

        # What is there.
        self._newest = 0  # the newest step
        self._rewritten = set[int]()  # steps of the checkpoints that this process has written
        # beginnings of the names of the objects of each folder
        self._used = dict[str, tuple[str, ...]]()
        # checksums of the files of the run folder; None: it has no such file
        self._sent = dict[str, bytes | None]()

        # What to write.
        self._request: SaveRequest | None = None  # the last save; None before the first one
        self._wanted = threading.Event()  # a copy of the run folder is wanted
        self._lock = threading.Lock()  # held during a copy

        # When a failed copy is tried again.
        self._delay = _LEAST_DELAY
        self._not_before = 0.0

        if settings.owns:
            threading.Thread(target=self.lease.keep, args=[self._lost], daemon=True).start()
            threading.Thread(target=self._follow, daemon=True).start()

    def _lost(self, error: Taken) -> None:
        self._news(News(error=str(error), taken=True))

    def _check(self) -> None:
        """Raise Taken if another process owns the mirror.

        Only rank 0 looks, because it completes the checkpoints.
        """
        if self._owns:
            self.lease.check()

    def _bad(self) -> set[int]:
        """Return the steps of damaged checkpoints there."""
        if self._request is None:
            return set()
        return set(self._request.bad) - self._rewritten

    def save(self, request: SaveRequest, data: memoryview, cancelled: Callable[[], bool]) -> None:
        """Write this rank's files of a checkpoint; rank 0 then completes it and deletes older ones.

        Args:
            request: what to write.
            data: the bytes of its tensors.
            cancelled: returns whether rank 0 must not wait for the others any longer.

        Raises:
            OSError: if an object cannot be written.
            Gone: if another rank failed, or the save was cancelled.
        """
        self._request = request
        folder = folder_of(request.step)
        attempt = f"{self.lease.number}-{request.attempt}"
        draft = f"{folder}/{attempt}-"  # beginning of the names of its objects
        shard = f"rank-{request.rank:05d}"

        def names() -> list[str]:
            there = self.bucket.sizes(folder)
            return [f"{folder}/{name}".removeprefix(draft) for name in there]

        try:
            blocks = (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))
            pieces = chain([padded(request.header)], blocks)
            entry = asdict(self._write(f"{draft}{shard}.safetensors", pieces, request.size))

            # Leave a file that says that the shard is complete: rank 0 waits for it.
            if request.rank != 0:
                self.bucket.put(f"{draft}{shard}.json", json.dumps(entry).encode())
                return

            # Wait for the other ranks.
            state = json.dumps(request.state, indent=1).encode()
            files = {
                f"{shard}.safetensors": entry,
                "state.json": asdict(self._write(f"{draft}state.json", [state])),
            }
            files |= gathered(
                names=names,
                read=lambda name: self.bucket.get(draft + name),
                ranks=request.ranks,
                cancelled=cancelled,
                pause=_PAUSE,
            )
        except OSError as error:
            # Leave a file that says so: rank 0, which waits for the shard, then gives up. A former
            # owner must not write anything.
            if not isinstance(error, Taken):
                with suppress(OSError):
                    self.bucket.put(f"{draft}{shard}.failed", b"failed")
            raise

        # Complete the checkpoint.
        content = manifest_of(request.step, files, request.about, request.tensors)
        self._seal(folder, MirrorManifest({**content, "attempt": attempt}))
        self._prune()
        self._news(News(step=request.step))

    def _write(self, name: str, pieces: Iterable[Any], size: int = 0) -> StoredObject:
        """Write an object of about ``size`` bytes, as long as this process owns the mirror."""

        def checked() -> Iterator[Any]:
            for piece in pieces:
                self._check()
                yield piece

        self._check()
        return self.bucket.write(name, checked(), size)

    def _remove(self, name: str) -> None:
        self._check()
        self.bucket.remove(name)

    def _seal(self, folder: str, manifest: MirrorManifest) -> None:
        """Write all that a manifest refers to, then the manifest, which makes the folder count."""
        if manifest.base is not None:
            self._copy_base(manifest.base)
        if manifest.step is not None:
            self._run_files()

        # Write the manifest, if it is new.
        name = f"{folder}/{MANIFEST}"
        content = signed(manifest.content)
        self._check()
        try:
            self.bucket.put(name, content, create=True)
        except FileExistsError:
            # If it is the same, the client has repeated its request, because an answer was lost.
            if self._content(name) != content:
                # Replace that of a damaged checkpoint, or of earlier final weights, but no other.
                damaged = self._request.bad if self._request is not None else []
                if manifest.step is not None and manifest.step not in damaged:
                    raise
                self._remove(name)
                self.bucket.put(name, content, create=True)
        self._used[folder] = _names_of(folder, manifest)
        if manifest.step is not None:
            self._rewritten.add(manifest.step)

    def _content(self, name: str) -> bytes | None:
        """Return the content of a manifest there; None if it is too long for one."""
        try:
            return self.bucket.get(name)
        except ValueError:
            return None

    def _copy_base(self, base: FrozenBase) -> None:
        """Copy the frozen parameters, unless they are there."""
        remote = f"{BASE}/{base.xxh3}"
        try:
            manifest_at(self.bucket, remote)
        except Damaged:  # or missing
            self._copy(self.run / base.folder, remote)

    def _run_files(self) -> None:
        """Write the files of the run folder that have changed; delete those that are gone."""
        for name in FILES:
            file = self.run / name
            content = file.read_bytes() if file.exists() else None
            digest = None if content is None else xxh3_64_digest(content)
            if self._sent.get(name, _UNKNOWN) != digest:
                if content is None:
                    self._remove(name)
                else:
                    self._write(name, [content])
            self._sent[name] = digest

    def _prune(self) -> None:
        """Delete checkpoints that need not be kept, and what incomplete attempts left behind."""
        there = [name for name in self.bucket.sizes("") if OURS.fullmatch(name)]
        steps = steps_in(self.bucket, there)

        # Damaged checkpoints do not count, and are not ours to delete.
        kept = self._bad()
        if self._request is None:
            kept.update(steps)  # no save has said yet which to keep
        else:
            kept |= self._request.keep.among([step for step in steps if step not in kept])

        # Delete manifests first, so that no checkpoint counts whose objects are gone.
        for step in steps:
            if step not in kept:
                self._remove(f"{folder_of(step)}/{MANIFEST}")

        # Delete the objects that no manifest needs any more.
        used = self._objects(FINAL)
        for step in kept:
            used += self._objects(folder_of(step))
        for name in there:
            if not name.startswith(used):
                self._remove(name)

    def _objects(self, folder: str) -> tuple[str, ...]:
        """Return the beginnings of the names of the objects that a folder needs."""
        if folder not in self._used:
            try:
                # written by an earlier start
                self._used[folder] = _names_of(folder, manifest_at(self.bucket, folder))
            except ValueError:
                self._used[folder] = (f"{folder}/",)  # damaged, or of another version
        return self._used[folder]

    def wanted(self, request: SaveRequest) -> None:
        """Start to copy the checkpoints of the run folder, after this save."""
        self._request = request
        self._wanted.set()

    def _follow(self) -> None:
        """Copy whenever it is wanted. Runs in a thread."""
        while self._wanted.wait():
            self._wanted.clear()
            if time.monotonic() >= self._not_before:
                self._copied()

    def _copied(self, *, ends: bool = False, final: bool = False) -> str | None:
        """Copy what the mirror lacks; return the error.

        Args:
            ends: at the end of the run, also the files of the run folder.
            final: also the final weights.
        """
        with self._lock:
            try:
                self._copy_checkpoints()
                self._newest = max(steps_in(self.bucket), default=0)
                if final:
                    self._copy(self.run / FINAL, FINAL)
                    self._prune()
                if ends:
                    self._run_files()
            except Exception as error:
                self._not_before = time.monotonic() + self._delay
                self._delay = min(2 * self._delay, _MOST_DELAY)
                self._news(News(error=str(error), taken=isinstance(error, Taken)))
                return str(error)
            self._delay = _LEAST_DELAY
            return None

    def _copy_checkpoints(self) -> None:
        """Copy the checkpoints of the run folder, newest first."""
        if self.counts:
            return  # they were written to the mirror
        there = set(steps_in(self.bucket)) - self._bad()
        for path in reversed(Store(self.run / CHECKPOINTS).sealed()):
            if step_of(path) in there:
                continue
            try:
                self._copy(path, f"{CHECKPOINTS}/{path.name}")
            except (FileNotFoundError, ValueError):  # a file, or its manifest
                if path.exists():
                    raise
                continue  # deleted meanwhile, because there are newer ones
            self._prune()
            self._news(News(step=step_of(path)))

    def _copy(self, folder: Path, remote: str) -> None:
        """Copy a folder with a manifest, and verify the files meanwhile."""
        attempt = f"{self.lease.number}-{uuid4().hex[:8]}"
        manifest = MirrorManifest({**read_manifest(folder), "attempt": attempt})
        written = {}
        with ExitStack() as stack:
            # Open all at once: open files stay readable if the checkpoint is deleted meanwhile.
            opened = [stack.enter_context((folder / name).open("rb")) for name in manifest.files]
            for name, stream in zip(manifest.files, opened, strict=True):
                blocks = iter(partial(stream.read, BLOCK), b"")
                size = os.fstat(stream.fileno()).st_size
                entry = self._write(f"{remote}/{attempt}-{name}", blocks, size)
                if entry.xxh3 != manifest.files[name].xxh3:
                    raise OSError(f"{folder / name} is damaged")
                written[name] = asdict(entry)
        self._seal(remote, MirrorManifest({**manifest.content, "files": written}))

    def end(self, *, final: bool) -> Answer:
        """Write what the mirror lacks, also the ``final`` weights.

        Return the newest step there, and the error.
        """
        error = self._copied(ends=True, final=final)
        return Answer(error=error, mirrored=self._newest)


def _names_of(folder: str, manifest: MirrorManifest) -> tuple[str, ...]:
    """Return the beginnings of the names of the objects that a manifest refers to."""
    own = (f"{folder}/{manifest.attempt}-", f"{folder}/{MANIFEST}")
    if manifest.base is None:
        return own
    return (*own, f"{BASE}/{manifest.base.xxh3}/")
