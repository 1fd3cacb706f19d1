"""A run folder with a mirror in a bucket."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import DONE, ERROR, BadInput
from oneloop.checkpoint.background_save import SaveInProgress
from oneloop.checkpoint.lease import Lease, Taken, take
from oneloop.checkpoint.mirror import FILES, OURS, fetch_files, steps_in
from oneloop.checkpoint.store import MANIFEST, step_of
from oneloop.run.folder import Folder


class MirroredFolder(Folder):
    """A run folder whose mirror has this ``address``. The mirror must be reachable at the start:
    only its lease proves that no other machine trains this run."""

    lease: Lease | None = None
    uploads: SaveInProgress | None = None  # once they write to the mirror

    def __init__(self, path: Path, address: str, *, say: Callable[[str], object] = print) -> None:
        super().__init__(path, say=say)
        self._address, self._newer_there, self._failed = address, False, False

    def inspect(
        self, resolved: Mapping[str, Any], *, resume: str = "auto", accept_changes: bool = False
    ) -> str | None:
        """:meth:`Folder.inspect`, of the folder and of its mirror. It is finished only if the
        mirror is, too."""
        super().inspect(resolved, resume=resume, accept_changes=accept_changes)
        self.finished = {}
        try:
            bucket = Bucket(self._address)
            names = bucket.sizes("")
            saved = [
                name.rpartition("/")[0]
                for name in names
                if OURS.fullmatch(name) and name.endswith(MANIFEST)
            ]
            known = {
                name
                for name in names
                if name in FILES or OURS.match(name) or name.startswith(("owner/", "."))
            }
            if not saved and (other := sorted(names.keys() - known)):
                raise BadInput(
                    f"{self._address} holds {other[0]}, which is not of oneloop; choose "
                    "another address"
                )
            if not saved:
                return None
            with TemporaryDirectory(prefix="oneloop-") as scratch:
                there = Folder(Path(scratch), name=f"the mirror {self._address}", say=self.say)
                fetch_files(bucket, there.path)
                for folder in saved:
                    (there.path / folder).mkdir(parents=True)
                found = there.inspect(resolved, resume=resume, accept_changes=accept_changes)
        except OSError as error:
            raise BadInput(
                f"the mirror cannot be read: {error}; check address, credentials and network"
            ) from error
        self.finished = there.finished
        return found and f"{found}; oneloop export {self._address} --to DIR writes its weights"

    def hold(self, *, need: int = 0) -> None:
        """:meth:`Folder.hold`; also become the owner of the mirror. A later start in this folder
        can do so at once."""
        super().hold(need=need)
        try:
            boot = Path("/proc/sys/kernel/random/boot_id")  # of this machine, since its start
            token = (
                f"{boot.read_text() if boot.exists() else uuid4()} {self.path.resolve()} "
                f"{self.path.stat().st_ino}"
            )
            bucket = Bucket(self._address)
            self.lease = take(bucket, {**self.owner, "token": token}, self.say)
            self._newer_there = steps_in(bucket)[-1:] > [
                step_of(path) for path in self._store.sealed()[-1:]
            ]
        except OSError as error:
            self.abandon()
            advice = "" if isinstance(error, Taken) else "; check address, credentials and network"
            raise BadInput(f"{error}{advice}") from error

    def starts(self, began: float, seconds: float) -> dict[str, float]:
        """:meth:`Folder.starts`, after fetching the files of a mirror with newer checkpoints."""
        if self._newer_there:
            fetch_files(Bucket(self._address), self.path)
        return super().starts(began, seconds)

    def uploaded(self, summary: dict[str, Any], *, final: bool) -> dict[str, Any]:
        """Write to the mirror what it lacks, also the ``final`` weights; return the summary with
        the newest step there. If that fails, a run that is done ends with an error."""
        if self.uploads is None or self._failed:
            return summary
        found = self.uploads.end_uploads(final=final)
        summary = {**summary, "mirrored": found.get("mirrored", 0)}
        self._failed = bool(found.get("error"))
        if self._failed and summary["exit_code"] == DONE:
            why = f"error: the mirror is incomplete: {found['error']}; the same command tries again"
            summary |= {"exit_reason": why, "exit_code": ERROR}
        return summary

    def abandon(self) -> None:
        """:meth:`Folder.abandon`, also of what was fetched."""
        with suppress(OSError):
            self._store.sweep(".fetched")
            self._store.root.rmdir()  # only if it is empty
        super().abandon()

    def close(self) -> None:
        """Release the lock and the mirror."""
        if self.uploads is not None:
            self.uploads.close()
        with suppress(OSError):
            if self.lease is not None and not self._failed:
                self.lease.renew(released=True)
        self._store.sweep(".fetched")
        super().close()
