"""The run folder: its lock, its files, and an earlier run in it."""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from oneloop.basics.differences import differences, listed
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, intact, one_line, printable, replacing, vouched, writing
from oneloop.basics.houses import tool
from oneloop.basics.untrusted import damaged, delete, read_json
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.named_checkpoint import reject_resume_path
from oneloop.checkpoint.store import Store, problems
from oneloop.launch.processes import Run
from oneloop.recipe.comparison import is_training_key
from oneloop.run.compatibility import SOURCE, input_differences

WORD = ".start-word"  # file with a random word of the last start that owned the mirror
_SECONDS = 10.0  # until a file from another machine appears on shared storage
_LONGER = (
    ". A longer duration needs no such key if schedule and EMA do not depend on it (schedule.name "
    "constant)"
)


class Finished(NamedTuple):
    """A finished run in a run folder."""

    message: str  # for the user
    summary: dict[str, Any]
    edited: bool  # whether the source of its task has changed since


class Folder:
    """The folder of one run; only rank 0 opens and writes it.

    Its methods raise BadInput if it is in use, unfinished, of another recipe, too full, or not
    writable.

    Args:
        path: may not exist yet.
        name: for messages (default: the path).
        say: reports to the user.
    """

    def __init__(self, path: Path, *, name: str = "", say: Callable[[str], object] = print) -> None:
        self.path = path
        self.say = say
        self._name = name or f"run.dir {path}"
        self.begun = False  # whether the run has begun to write
        self._made: list[Path] = []
        self._lock = FileLock(path / ".lock", blocking=False)
        self._locked = 0  # inode of the lock
        self._store = Store(path / "checkpoints")

    def inspect(
        self, inputs: Mapping[str, Any], *, resume: str = "auto", accept_changes: bool = False
    ) -> Finished | None:
        """Check the folder without changing it.

        Args:
            inputs: what is trained, by :func:`oneloop.run.compatibility.recipe_inputs`.
            resume: the key run.resume.
            accept_changes: allow the run of another recipe.

        Returns:
            This run, if the folder holds it and it is finished.
        """
        if resume not in ("auto", "never"):
            reject_resume_path(resume)
        with writing(self._name, "choose another run.dir"):
            # Is it a run folder that nobody uses?
            if not self.path.exists():
                return None
            if not self.path.is_dir():
                raise BadInput(f"{self._name} is a file; choose another run.dir")
            if self._in_use():
                raise BadInput(
                    f"{self._name} is in use by {self._owner()}; wait for it, or choose another "
                    "run.dir"
                )
            saved = bool(self._store.sealed()) or (self.path / "final").exists()
            names = {path.name for path in self.path.iterdir()}
            if not saved and names and not names & {".lock", "environment.json"}:
                raise BadInput(
                    f"{self._name} has files that do not belong to a oneloop run; choose another "
                    "run.dir"
                )

            # Is there a run? One without a checkpoint may be overwritten.
            if resume == "never" and (saved or "recipe.yaml" in names):
                raise BadInput(
                    f"{self._name} holds a run, and run.resume is never; choose another run.dir"
                )
            return self._finished(inputs, accept_changes) if saved else None

    def _finished(self, inputs: Mapping[str, Any], accept_changes: bool) -> Finished | None:
        """Return this run if it is finished. Raise BadInput if the folder holds another one."""
        # Is it a run of this recipe?
        record = self.read("environment.json", read_vouched)
        if record is None:
            return None
        with damaged(f"{self.path}/environment.json"):
            before = record["inputs"]
            # A key that this version does not have has no value now.
            built = {name: text for name, text in before.items() if not is_training_key(name)}
            now = {**built, **inputs}
            changed = input_differences(before, now)
            is_same = not differences(before, now).keys() - {SOURCE}
        edited = changed.pop(SOURCE, None) is not None
        if changed and not accept_changes:
            raise BadInput(
                f"{self._name} holds a run of another recipe ({listed(changed)}); "
                "choose another run.dir, use the same recipe, or continue with "
                f"--run.accept_changes true{_LONGER if 'duration' in changed else ''}"
            )

        # Is it finished, with intact final weights?
        ended = self.read("summary.json", read_vouched)
        if not is_same or not ended or ended.get("exit_code") != 0:
            return None
        if not str(ended.get("exit_reason", "")).startswith(("done", "early stop")):
            return None
        final = self.path / "final"
        if (final / MANIFEST).exists():
            wrong = problems(final)
            if wrong:
                self.say(f"{final} is damaged ({'; '.join(wrong[:3])}); rewriting it")
                return None
        message = (
            f"{self._name.rpartition(' ')[2]} holds this run, finished at step "
            f"{ended.get('step')}: nothing to do"
        )
        if edited:
            message += (
                "; the source of its task has changed since: choose another run.dir to train it"
            )
        del ended["checksum"]
        return Finished(message, ended, edited)

    def read(
        self,
        name: str,
        read: Callable[[Path], dict[str, Any]],
    ) -> dict[str, Any] | None:
        """Return the parsed content of a file; None if it is missing or damaged.

        Damage is logged.
        """
        file = self.path / name
        try:
            with damaged("it"):
                return read(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.say(f"{file} is damaged ({error}); rewriting it")
            return None

    def _in_use(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        try:
            with FileLock(self.path / ".lock", blocking=False):
                return False
        except Timeout:
            return True

    def _owner(self) -> str:
        try:
            with damaged("owner.json"):
                owner = read_json(self.path / "owner.json")
                who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
                return one_line(printable(who))
        except (OSError, ValueError):
            return "another process"

    def hold(self, *, need: int = 0) -> None:
        """Create the folder and lock it.

        The operating system releases the lock when this process ends.

        Args:
            need: bytes that the run will still write.
        """
        self._made = [parent for parent in (self.path, *self.path.parents) if not parent.exists()]
        with self._writing():
            folders = (self.path, *self.path.absolute().parents)
            free = shutil.disk_usage(next(folder for folder in folders if folder.exists())).free
            if free < need:
                raise BadInput(
                    f"run.dir {self.path}: the run needs about {need / 2**20:,.0f} MiB, and "
                    f"{free / 2**20:,.0f} MiB are free on its disk; make room, choose another "
                    "run.dir, or keep fewer (--save.keep 1, --save.best false)"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._locked = (self.path / ".lock").stat().st_ino
            self.owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%F %T"),
            }
            (self.path / "owner.json").write_text(json.dumps(self.owner))

    def begin(self, recipe: str, environment: Mapping[str, Any]) -> None:
        """Write the resolved recipe (YAML) and the environment, before the first step."""
        with self._writing():
            self.write_json("environment.json", vouched(environment))
            self.write("recipe.yaml", recipe)
            delete(self.path / "summary.json", inside=self.path)
        self.begun = True

    def starts(self, began: float, seconds: float) -> dict[str, float]:
        """Return the times of all starts, from which the report computes goodput.

        Args:
            began: time of this start, in seconds since 1970.
            seconds: training time of the checkpoint that it continues from (0: there is none).
        """
        goodput = tool("goodput")
        return goodput.starts(self, began, seconds) if goodput else {}

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with writing(f"run.dir {self.path}", "make room, or choose another"):
                yield
        except Timeout:
            raise BadInput(
                f"run.dir {self.path} is in use by {self._owner()}; choose another run.dir"
            ) from None
        except BadInput:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Release the lock, and remove what :meth:`hold` created if the run did not begin."""
        # Without the lock, the files are those of another process.
        folders = self._made
        if self._lock.is_locked:
            self.close()
            folders = [self._store.root, *folders]
            if self._made and not self.begun:
                for name in (".lock", WORD):
                    (self.path / name).unlink(missing_ok=True)
        if self.begun:
            return
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()  # only if it is empty

    def record(self, summary: dict[str, Any], *, final: bool) -> dict[str, Any]:
        """Write summary.json, and return the summary with what a mirror adds.

        Args:
            summary: of the run.
            final: whether a mirror gets the weights in ``final/``, too.
        """
        try:
            self.write_json("summary.json", vouched(summary))
            delete(self.path / "STOP", inside=self.path)
        except OSError as error:  # a full disk: the exit code still reports the result
            print(f"the end of the run cannot be written: {error}", file=sys.stderr)
        return summary

    def close(self) -> None:
        """Release the lock."""
        if not self.moved():
            # The disk may be read-only by now. The file is harmless: the lock says who owns it.
            with suppress(OSError):
                (self.path / "owner.json").unlink(missing_ok=True)
        self._lock.release()

    def moved(self) -> str:
        """Return an error message if another folder, or none, is where this run locked its own."""
        try:
            if (self.path / ".lock").stat().st_ino == self._locked:
                return ""
        except FileNotFoundError:
            if (self.path / "recipe.yaml").exists():
                return ""  # only the lock was deleted
        except OSError:
            return ""  # the storage fails, which a write reports
        return (
            f"run.dir {self.path} was renamed or replaced while the run wrote to it; rename it "
            "back, and start the same command again"
        )

    def write(self, name: str, text: str) -> None:
        """Write one file atomically."""
        with replacing(self.path / name) as draft:
            draft.write_text(text, encoding="utf-8")

    def write_json(self, name: str, content: Any) -> None:
        self.write(name, dumps(content, indent=2) + "\n")


def read_vouched(file: Path) -> dict[str, Any]:
    """Return a JSON file that has a checksum. Raise ValueError if it is damaged."""
    content: dict[str, Any] = read_json(file)
    if not intact(content):
        raise ValueError("its checksum differs")
    return content


def in_one_folder(folder: Path, run: Run, patience: float, *, required: bool) -> bool:
    """Compare the run folders of all ranks. Collective: call on every rank.

    Args:
        folder: the run folder, which rank 0 has locked.
        run: this process.
        patience: factor of the time that a file may take to appear on another machine.
        required: whether it is an error if a rank sees another folder.

    Returns:
        Whether all ranks see the folder of rank 0.

    Raises:
        BadInput: a rank sees another folder, and it is ``required``.
    """
    # Wait until this rank sees the file that rank 0 wrote.
    file = folder / "owner.json"
    owner = run.from_main(_read(file) if run.main else None)
    until = time.monotonic() + _SECONDS * (patience or 1.0)
    while _read(file) != owner and time.monotonic() < until:
        time.sleep(0.1)

    there = run.gathered((_read(file) == owner, f"{folder.absolute()} on {socket.gethostname()}"))
    for rank, (same, path) in enumerate(there):
        if not same and required:
            raise BadInput(
                f"run.dir {folder} is another folder on rank {rank} ({path}) than on rank 0 "
                f"({there[0][1]}); put it on shared storage, or set save.mirror"
            )
    return all(same for same, _ in there)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
