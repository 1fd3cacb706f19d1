"""The uploads of a writing process to a mirror, under the lease of the run."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from oneloop.basics.bucket import BLOCK, Bucket
from oneloop.checkpoint.lease import Lease, Taken, take
from oneloop.checkpoint.mirror import BASE, CHECKPOINTS, FILES, FINAL, folder_of, manifest_at, steps_in
from oneloop.checkpoint.store import MANIFEST, Keep, Store, manifest_of, read_manifest, signed, step_of
from oneloop.checkpoint.writer import SaveRequest, gathered, padded

_PAUSE = 0.3  # seconds between two looks for the shards of other ranks
_BACKOFF = (10.0, 600.0)  # least and most seconds until a failed upload is tried again


class Uploads:
    """The uploads of one process. Its methods raise OSError.

    Args:
        address: of the mirror.
        run: the run folder.
        limit: bytes per second; 0: no limit.
        counts: whether a checkpoint counts only when it is in the mirror; otherwise it is a copy.
        lease: number (0: none yet) and description of the run's lease.
        bad: steps of damaged checkpoints in the mirror.
        owns: whether this process renews the lease, and makes copies.
        news: reports ``step`` (the newest one in the mirror), ``error`` and ``taken``.
    """

    def __init__(
        self,
        address: str,
        run: str,
        limit: float,
        counts: bool,
        lease: tuple[int, Mapping[str, Any]],
        bad: Iterable[int],
        owns: bool,
        news: Callable[..., None],
    ) -> None:
        self.bucket, self.run, self.counts, self._news = Bucket(address, limit=limit), Path(run), counts, news
        self.lease, self._bad = Lease(self.bucket, *lease), set(bad)
        self._keep: dict[str, Any] | None = None
        self._failures, self._not_before = 0, 0.0
        self._lock, self._wanted, self._ended = threading.Lock(), threading.Event(), threading.Event()
        if owns and self.lease.number:
            self._renew()
        if owns and not counts:
            threading.Thread(target=self._follow, daemon=True).start()

    def _renew(self) -> None:
        taken = lambda error: self._news(error=str(error), taken=True)  # noqa: E731
        threading.Thread(target=self.lease.keep, args=[self._ended, taken], daemon=True).start()

    def save(self, request: SaveRequest, data: memoryview, cancelled: Callable[[], bool]) -> None:
        """Write this rank's files of a checkpoint; rank 0 then completes it, and deletes older ones. Raises Gone if
        another rank failed."""
        folder, head = folder_of(request.step), padded(request.header)
        draft, shard = f"{folder}/{self.lease.number}-{request.attempt}-", f"rank-{request.rank:05d}"
        self.lease.check()
        try:
            pieces = [head, *(data[at : at + BLOCK] for at in range(0, len(data), BLOCK))]
            entry = self._write(f"{draft}{shard}.safetensors", pieces, len(head) + len(data))
            if request.rank:
                self.bucket.put(f"{draft}{shard}.json", json.dumps(entry).encode())
                return
            state = json.dumps(request.state, indent=1).encode()
            files = {
                f"{shard}.safetensors": entry,
                "state.json": self._write(f"{draft}state.json", [state], len(state)),
            }
            names = lambda: [f"{folder}/{name}".removeprefix(draft) for name in self.bucket.sizes(folder)]  # noqa: E731
            files |= gathered(names, lambda name: self.bucket.get(draft + name), request.ranks, cancelled, _PAUSE)
        except OSError:
            with suppress(OSError):
                self.bucket.put(f"{draft}{shard}.failed", b"failed")
            raise
        manifest = manifest_of(request.step, files, request.about, request.tensors)
        self._seal(folder, {**manifest, "attempt": f"{self.lease.number}-{request.attempt}"})
        self._keep = request.keep
        self._prune()
        self._news(step=request.step)

    def _write(self, name: str, pieces: Iterable[Any], size: int) -> dict[str, Any]:
        def guarded() -> Iterator[Any]:
            for piece in pieces:
                self.lease.guard()
                yield piece

        return self.bucket.write(name, guarded(), size)

    def _seal(self, folder: str, manifest: Mapping[str, Any]) -> None:
        """Write all that a manifest refers to, then the manifest: from now on, the folder counts."""
        base = manifest.get("about", {}).get("base")
        if base and f"{base['xxh3']}/{MANIFEST}" not in self.bucket.sizes(BASE):
            self._copy(self.run / Path(base["folder"]).name, f"{BASE}/{base['xxh3']}")
        if "step" in manifest:
            self._run_files()
        name = f"{folder}/{MANIFEST}"
        self.lease.check()
        try:
            self.bucket.put(name, signed(manifest), create=True)
        except FileExistsError:
            if self.bucket.get(name) != signed(manifest):  # else the client has repeated its request: an answer was lost
                self.bucket.remove([name])  # of a damaged checkpoint, or of earlier final weights
                self.bucket.put(name, signed(manifest), create=True)

    def _run_files(self) -> None:
        """Write the files of the run folder; delete those that it does not have any more."""
        for name in FILES:
            self.lease.guard()
            try:
                content = (self.run / name).read_bytes()
                self.bucket.write(name, [content], len(content))
            except FileNotFoundError:
                self.bucket.remove([name])

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept, and what incomplete attempts left behind."""
        if self._keep is None:
            return
        steps, used = steps_in(self.bucket), set[str]()
        kept = Keep(**self._keep).among(steps)
        self.lease.check()
        self.bucket.remove([f"{folder_of(step)}/{MANIFEST}" for step in steps if step not in kept])
        for folder in [FINAL, *map(folder_of, kept)]:
            try:
                manifest = manifest_at(self.bucket, folder)
            except ValueError:
                used.add(f"{folder}/")  # damaged, or of another version: it is not ours to delete
                continue
            used |= {f"{folder}/{manifest['attempt']}-", f"{folder}/{MANIFEST}"}
            used.add(f"{BASE}/{(manifest['about'].get('base') or {}).get('xxh3')}/")
        there = [f"{folder}/{name}" for folder in (CHECKPOINTS, BASE, FINAL) for name in self.bucket.sizes(folder)]
        self.bucket.remove([name for name in there if not name.startswith(tuple(used))])

    def wanted(self, keep: dict[str, Any]) -> None:
        """Start to copy the checkpoints of the run folder, if no copy is in progress."""
        self._keep = keep
        self._wanted.set()

    def _follow(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            if time.monotonic() >= self._not_before:
                self._copied()

    def _copied(self, *, final: bool | None = None) -> str | None:
        """Copy what the mirror lacks; return the error. ``final``: at the end of the run, with the final weights."""
        with self._lock:
            try:
                self._copy_checkpoints()
                if final:
                    self._copy(self.run / FINAL, FINAL)
                    self._prune()
                if final is not None:
                    self._run_files()
            except (OSError, ValueError) as error:
                self._failures += 1
                self._not_before = time.monotonic() + min(_BACKOFF[0] * 2**self._failures, _BACKOFF[1])
                self._news(error=str(error), taken=isinstance(error, Taken))
                return str(error)
            self._failures = 0
            return None

    def _copy_checkpoints(self) -> None:
        if not self.lease.number:
            self.lease = take(self.bucket, self.lease.about, wait=False)
            self._renew()
        store = Store(self.run / CHECKPOINTS)
        while not self.counts:
            there = set(steps_in(self.bucket)) - self._bad
            missing = [path for path in store.sealed() if step_of(path) not in there]
            if not missing:
                return
            with suppress(FileNotFoundError):  # deleted meanwhile, because there are newer ones
                self._copy(missing[-1], f"{CHECKPOINTS}/{missing[-1].name}")
                self._bad.discard(step_of(missing[-1]))
                self._prune()
                self._news(step=step_of(missing[-1]))

    def _copy(self, folder: Path, remote: str) -> None:
        manifest, attempt = read_manifest(folder), f"{self.lease.number}-{uuid4().hex[:8]}"
        files = manifest["files"]
        with ExitStack() as stack:  # open files stay readable if the checkpoint is deleted meanwhile
            streams = {name: stack.enter_context((folder / name).open("rb")) for name in files}
            for name, stream in streams.items():
                blocks = iter(lambda stream=stream: stream.read(BLOCK), b"")  # type: ignore[misc]
                entry = self._write(f"{remote}/{attempt}-{name}", blocks, os.fstat(stream.fileno()).st_size)
                if entry["xxh3"] != files[name]["xxh3"]:
                    raise OSError(f"{folder / name} is damaged")
                files[name] = entry
        self._seal(remote, {**manifest, "attempt": attempt})

    def end(self, *, final: bool) -> dict[str, Any]:
        """Write what the mirror lacks, also the ``final`` weights. Return the newest step there, and the error."""
        error, step = self._copied(final=final), 0
        with suppress(OSError):
            step = max(steps_in(self.bucket), default=0)
        return {"mirrored": step, "error": error}
