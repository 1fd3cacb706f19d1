"""A mirror as a storage of checkpoints, and the copies of a run folder that are written to it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from oneloop.basics.bucket import BLOCK, Bucket
from oneloop.checkpoint.lease import Lease
from oneloop.checkpoint.manifest import (
    BASE,
    MANIFEST,
    base_folder,
    base_in,
    read_manifest,
    signed,
)
from oneloop.checkpoint.mirror import (
    CHECKPOINTS,
    FILES,
    FINAL,
    OURS,
    Damaged,
    folder_of,
    manifest_at,
    steps_in,
)
from oneloop.checkpoint.save_request import Answer, SaveRequest
from oneloop.checkpoint.store import Draft, Keep, Store, step_of


class RemoteDraft(Draft):
    """The objects of a folder of a mirror that does not count yet.

    Args:
        store: the mirror.
        folder: the name of the folder there.
        attempt: number or name of the attempt to write it.
    """

    pause = 0.3

    def __init__(self, store: "Uploads", folder: str, attempt: object) -> None:
        super().__init__(store, Path(folder))
        self.folder = folder
        self.attempt = f"{store.lease.number}-{attempt}"
        self._beginning = f"{folder}/{self.attempt}-"

    def names(self) -> list[str]:
        """Return the names of its files."""
        names = self.store.bucket.sizes(self.folder)
        return [f"{self.folder}/{name}".removeprefix(self._beginning) for name in names]

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = self.store.bucket.get(self._beginning + name)
        return content

    def put(self, name: str, content: bytes) -> dict[str, Any]:
        """Write a small file atomically; return its manifest entry."""
        return self.write(name, [content])

    def write(self, name: str, pieces: Iterable[Any], size: int = 0) -> dict[str, Any]:
        """Write a file of about ``size`` bytes, as long as this process owns the mirror."""

        def checked() -> Iterator[Any]:
            for piece in pieces:
                self.store.check()
                yield piece

        self.store.check()
        entry: dict[str, Any] = self.store.bucket.write(self._beginning + name, checked(), size)
        return entry

    def seal(self, manifest: dict[str, Any], flushed: Iterable[str] = ()) -> None:
        """Write all that a manifest refers to, then the manifest, which makes the folder count.

        Then delete the other objects of the folder.
        """
        store = self.store
        bucket = store.bucket
        step = manifest.get("step")
        base = base_in(manifest)
        if base is not None:
            try:
                manifest_at(bucket, f"{BASE}/{base['xxh3']}")
            except Damaged:  # or missing
                store.copy(base_folder(store.run, base), f"{BASE}/{base['xxh3']}")
        if step is not None:
            store.copy_files()

        # Write the manifest, if it is new.
        name = f"{self.folder}/{MANIFEST}"
        content = signed({**manifest, "attempt": self.attempt})
        store.check()
        try:
            bucket.put(name, content, create=True)
        except FileExistsError:
            # If it is the same, the client has repeated its request, because an answer was lost.
            previous = None
            with suppress(ValueError):  # too long for a manifest
                previous = bucket.get(name)
            if previous != content:
                # Replace that of a damaged checkpoint, or of earlier final weights, but no other.
                damaged = store.request.bad if store.request is not None else []
                if step is not None and step not in damaged:
                    raise
                store.remove(name)
                bucket.put(name, content, create=True)
        if step is not None:
            store.rewritten.add(step)
            store.news(Answer(mirrored=step, is_news=True))

        # Delete what earlier attempts have left there.
        for other in bucket.sizes(self.folder):
            path = f"{self.folder}/{other}"
            if OURS.fullmatch(path) and not other.startswith((f"{self.attempt}-", MANIFEST)):
                store.remove(path)


class Uploads:
    """The uploads of one process; methods raise OSError.

    Args:
        address: of the mirror.
        run: the run folder.
        counts: checkpoints are written only to the mirror.
        lease: number and description of the run's :class:`Lease`.
        owns: this process renews the lease, and copies.
        news: receives the newest step there, or an error.
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        counts: bool,
        lease: tuple[int, Mapping[str, Any]],
        owns: bool,
        news: Callable[[Answer], None],
    ) -> None:
        # The connection.
        self.bucket = Bucket(address)
        self.run = Path(run)
        self.counts = counts
        self.lease = Lease(self.bucket, *lease)
        self._owns = owns
        self.news = news

        # What is there.
        self._newest = 0  # the newest step at the last copy
        self.rewritten = set[int]()  # steps of the checkpoints that this process has written

        # What to write.
        self.request: SaveRequest | None = None  # the last save; None before the first one
        self.wanted = threading.Event()  # a copy of the run folder is wanted
        self._lock = threading.Lock()  # held during a copy

        if owns:
            threading.Thread(target=self.lease.keep, args=[self._report], daemon=True).start()
            threading.Thread(target=self._follow, daemon=True).start()

    def _report(self, error: Exception) -> None:
        self.news(Answer(error=f"{type(error).__name__}: {error}", is_news=True))

    def check(self) -> None:
        """Raise Taken if another process owns the mirror.

        Only rank 0 looks, because it completes the checkpoints.
        """
        if self._owns:
            self.lease.check()

    def _bad(self) -> set[int]:
        """Return the steps of damaged checkpoints there."""
        bad = self.request.bad if self.request is not None else []
        return set(bad) - self.rewritten

    def draft(self, step: int, attempt: int) -> RemoteDraft:
        """Return a draft, in which all ranks write."""
        return RemoteDraft(self, folder_of(step), attempt)

    def remove(self, name: str) -> None:
        self.check()
        self.bucket.remove(name)

    def copy_files(self) -> None:
        """Write the files of the run folder; delete those that are gone."""
        for name in FILES:
            file = self.run / name
            if file.exists():
                self.check()
                self.bucket.put(name, file.read_bytes())
            else:
                self.remove(name)

    def prune(self, keep: Keep) -> None:
        """Delete checkpoints that need not be kept, and what incomplete attempts left behind."""
        names = [f"{CHECKPOINTS}/{name}" for name in self.bucket.sizes(CHECKPOINTS)]
        steps = steps_in(self.bucket, names)

        # Damaged checkpoints do not count, and are not ours to delete.
        kept = self._bad()
        kept |= keep.among([step for step in steps if step not in kept])

        # Delete manifests first, so that no checkpoint counts whose objects are gone.
        folders = tuple(f"{folder_of(step)}/" for step in kept)
        ours = [name for name in names if OURS.fullmatch(name) and not name.startswith(folders)]
        for name in sorted(ours, key=lambda name: not name.endswith(MANIFEST)):
            self.remove(name)

    def _follow(self) -> None:
        """Copy whenever it is wanted. Runs in a thread."""
        while self.wanted.wait():
            self.wanted.clear()
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
                    self.copy(self.run / FINAL, FINAL)
                if ends:
                    self.copy_files()
            except Exception as error:
                self._report(error)
                return str(error)
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
                self.copy(path, f"{CHECKPOINTS}/{path.name}")
            except (FileNotFoundError, ValueError):  # a file, or its manifest
                if path.exists():
                    raise
                continue  # deleted meanwhile, because there are newer ones
            if self.request is not None:  # else no save has said which to keep
                self.prune(self.request.keep)

    def copy(self, folder: Path, remote: str) -> None:
        """Copy a folder with a manifest, and verify the files meanwhile."""
        draft = RemoteDraft(self, remote, uuid4().hex[:8])
        manifest = read_manifest(folder)
        files = manifest["files"]
        with ExitStack() as stack:
            # Open all at once: open files stay readable if the checkpoint is deleted meanwhile.
            streams = [stack.enter_context((folder / name).open("rb")) for name in files]
            for name, stream in zip(files, streams, strict=True):
                blocks = iter(partial(stream.read, BLOCK), b"")
                if draft.write(name, blocks, files[name]["size"]) != files[name]:
                    raise OSError(f"{folder / name} is damaged")
        draft.seal(manifest)

    def end(self, *, final: bool) -> Answer:
        """Write what the mirror lacks, also the ``final`` weights.

        Return the newest step there, and the error.
        """
        error = self._copied(ends=True, final=final)
        return Answer(error=error, mirrored=self._newest)
