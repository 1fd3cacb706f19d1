"""A run folder with a mirror in a bucket."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from xxhash import xxh3_128_hexdigest

from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import DONE, ERROR, BadInput, Unavailable
from oneloop.basics.files import replacing
from oneloop.basics.system.processes import boot_id
from oneloop.basics.untrusted import read_bytes
from oneloop.checkpoint.background_save import BackgroundSaves
from oneloop.checkpoint.lease import Lease, Taken, take
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.mirror import FILES, OURS, fetch_files, readable, steps_in
from oneloop.checkpoint.store import step_of
from oneloop.run.folder import WORD, Finished, Folder

_MOST_WORD = 64  # bytes
_SOON = 3.0  # seconds until a wait is reported


class MirroredFolder(Folder):
    """A run folder with a mirror in a bucket.

    The mirror must be reachable at the start: only its lease proves that no other machine trains
    this run.

    Args:
        path: of the folder; may not exist yet.
        address: of the mirror.
        say: reports to the user.
    """

    lease: Lease | None = None
    uploads: BackgroundSaves | None = None  # once they write to the mirror

    def __init__(self, path: Path, address: str, *, say: Callable[[str], object] = print) -> None:
        super().__init__(path, say=say)
        self._address = address
        self._newer_there = False  # whether the mirror has checkpoints that the folder lacks
        self._failed = False  # whether an upload has failed

    def inspect(
        self, inputs: Mapping[str, Any], *, resume: str = "auto", accept_changes: bool = False
    ) -> Finished | None:
        """:meth:`Folder.inspect`, of the folder and of its mirror.

        The run is finished only if the mirror is, too."""
        super().inspect(inputs, resume=resume, accept_changes=accept_changes)
        with self._reading():
            # Is it the mirror of a run?
            bucket = Bucket(self._address)
            names = bucket.sizes("")
            ours = [name for name in names if OURS.match(name)]
            manifests = [name for name in ours if name.endswith(MANIFEST)]
            others = names.keys() - {*FILES, *ours}
            others = {name for name in others if not name.startswith(("owner/", "."))}
            if others and not manifests:
                raise BadInput(
                    f"{self._address} holds {min(others)}, which is not of oneloop; choose "
                    "another address"
                )
            if not manifests:
                return None

            # Inspect a folder with the same small files, and with empty checkpoints.
            with TemporaryDirectory(prefix="oneloop-") as scratch:
                there = Folder(Path(scratch), name=f"the mirror {self._address}", say=self.say)
                fetch_files(bucket, there.path)
                for manifest in manifests:
                    (there.path / manifest).parent.mkdir(parents=True)
                finished = there.inspect(inputs, resume=resume, accept_changes=accept_changes)
        if finished is None:
            return None
        more = f"oneloop export {self._address} --to DIR writes its weights"
        return finished._replace(message=f"{finished.message}; {more}")

    @contextmanager
    def _announced(self, waits: str) -> Iterator[None]:
        """Report what the run ``waits`` for if the block takes longer than a few seconds."""
        line = f"waiting for {waits} ({self._address})"
        timer = threading.Timer(_SOON, self.say, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read the mirror: report a long wait, and raise errors as BadInput or Unavailable."""
        with self._announced("the mirror to answer"), readable(self._address, self.path):
            yield

    def hold(self, *, need: int = 0) -> None:
        """:meth:`Folder.hold`; also become the owner of the mirror.

        A later start in this folder can do so at once: it has the same token."""
        super().hold(need=need)
        try:
            # Each start writes a new word into the folder once it is the owner. The token of the
            # earlier start has the word from before.
            earlier = self._token(self.path / WORD)
            with self._reading(), self._writing(), replacing(self.path / WORD) as draft:
                bucket = Bucket(self._address)
                draft.write_text(token_hex(16))
                about = {**self.owner, "token": self._token(draft)}
                self.lease = take(bucket, about, earlier=earlier, say=self.say)
                newest_there = steps_in(bucket)[-1:]
            newest_here = [step_of(path) for path in self._store.sealed()[-1:]]
            self._newer_there = newest_there > newest_here
        except (Taken, BadInput, Unavailable) as error:
            self.abandon()
            if isinstance(error, Taken):
                raise BadInput(str(error)) from error
            raise

    def _token(self, word: Path) -> str:
        """Return what identifies a start in this folder, on this machine since it was started.

        A copy of the folder has the same word, but in another file. Empty if there is no word.
        """
        started = boot_id()
        with suppress(OSError, ValueError):
            written = read_bytes(word, _MOST_WORD).hex()
            text = f"{started} {self.path.resolve()} {word.stat().st_ino} {written}"
            return xxh3_128_hexdigest(text.encode()) if started else ""
        return ""

    def starts(self, began: float, seconds: float) -> dict[str, float]:
        """:meth:`Folder.starts`, after fetching the files of a mirror with newer checkpoints."""
        if self._newer_there:
            with self._reading():
                fetch_files(Bucket(self._address), self.path)
        return super().starts(began, seconds)

    def record(self, summary: dict[str, Any], *, final: bool) -> dict[str, Any]:
        """:meth:`Folder.record`; also write to the mirror what it lacks.

        The summary gets the newest step in the mirror. If an upload fails, a run that is done ends
        with an error. An upload may take long, so the summary is written before it, too.
        """
        super().record(summary, final=final)
        if self.uploads is None or self._failed:
            return summary
        with self._announced("the last uploads to the mirror"):
            found = self.uploads.end_uploads(final=final)
        summary = {**summary, "mirrored": found.mirrored}
        self._failed = bool(found.error)
        if self._failed and summary["exit_code"] == DONE:
            summary["exit_reason"] = (
                f"error: the mirror is incomplete: {found.error}; the same command tries again"
            )
            summary["exit_code"] = ERROR
        return super().record(summary, final=final)

    def close(self) -> None:
        """Release the lock and the mirror."""
        if self.uploads is not None:
            self.uploads.close()
        with suppress(OSError):
            if self.lease is not None and not self._failed:
                self.lease.renew(released=True)
        super().close()
        self._store.sweep(".fetched")
