"""Row groups of remote files as Arrow files in the cache, which the processes of a host share.

The first process that needs a group makes its file, under a lock; the others map it.
"""

import fcntl
import json
import math
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oneloop.basics.bucket import StoreError
from oneloop.basics.files import cache_folder, one_line, replacing, writing
from oneloop.basics.launcher import local_ranks
from oneloop.basics.untrusted import delete
from oneloop.tasks.rows.cache import alone, key_of
from oneloop.tasks.rows.remote.remote_file import RowGroup

_FOLDER = "row_groups"
_LAUNCHER = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""variables that all processes of a run on a host have in common"""
_TRIES = 10
_LOCKS = 256  # files; a group has one of them
_NEWEST = 4  # groups that no plan needs, and that are kept even if the budget is used up
_SLOW = 1.0  # seconds of waiting after which it is reported

# ends of the names of files, which begin with the name of a group
_MADE = ".arrow"
_BEGUN = ".begun"  # an empty file as large as the group will be
_TROUBLE = ".trouble"  # the last error that a further try may overcome
_FAILED = ".failed"  # the error that ended the last try
_WAITS = ".waits"  # a process waits for it
_PLAN = ".plan"  # not of a group, but of a rank: the step of the next use of each group


@dataclass
class _Room:
    """What a folder of row groups holds, by the names of the groups.

    Args:
        sizes: bytes of each group; of one that is being made, those that it needs at most.
        droppable: the groups that can be dropped, the first ones first.
        next_use: the step of the next use of each group that a plan needs.
        users: how many plans need a group.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    droppable: list[str] = field(default_factory=list)
    next_use: dict[str, int] = field(default_factory=dict)
    users: Counter[str] = field(default_factory=Counter)


class RowGroupCache:
    """The row groups of a data set that a run keeps on this host.

    It can be pickled, and used after a fork. Processes of one launcher, and the data workers of a
    process, have the same groups.

    Args:
        address: the address of the data set.
        columns: the columns to read.
        budget: bytes of all groups.
    """

    def __init__(self, address: str, columns: Sequence[str], budget: int) -> None:
        run = [os.environ.get(name, "") for name in _LAUNCHER]
        if local_ranks() < 2:
            run = [str(os.getpid()), str(time.time_ns())]
        key = key_of(socket.gethostname(), run, address, columns)
        self._folder = (cache_folder() / _FOLDER / key).absolute()
        self._columns = columns
        self._budget = budget
        self._user = 0  # the process that has opened the folder
        self._open()

    def read(self, group: RowGroup) -> Any:
        """Return a row group as a ``pyarrow.Table``, which is mapped from its file.

        Raises:
            StoreError: the store fails.
            ValueError: the group cannot be decoded, or the disk is full.
        """
        import pyarrow

        self._open()
        file = self._file(group, _MADE)
        for _ in range(_TRIES):
            # Another process may have dropped the file.
            with suppress(FileNotFoundError):
                os.utime(file)  # the time of its last use
                return pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
            remedy = (
                f"a row group has {group.size / 2**20:,.1f} MB: make room, set ONELOOP_CACHE to a "
                "folder on another disk, or set a smaller task.window in a new run"
            )
            with writing(self._folder.parent, remedy, only_full=True):
                self._wait(group)
        raise RuntimeError(
            f"{group.file.where}: row group {group.number} was dropped {_TRIES} times before it "
            "was read; set a larger task.window"
        )

    def _wait(self, group: RowGroup) -> None:
        """Make a row group that a process waits for, or wait until another process has made it."""
        waits = self._file(group, f"-{os.getpid()}{_WAITS}")
        waits.write_text(f", which waits for {group.file.where}, row group {group.number}")
        try:
            self.make(group, since=time.time())
            self._drop_spare()
        finally:
            waits.unlink(missing_ok=True)

    def make(self, group: RowGroup, *, since: float = math.inf) -> None:
        """Fetch a row group and write its file, unless another process has done so.

        Args:
            group: the group.
            since: since when this process waits. If another process has tried it and failed since
                then, its error is raised: each try may take minutes.
        """
        file = self._file(group, _MADE)
        failed = self._file(group, _FAILED)
        trouble = self._file(group, _TROUBLE)

        def report(tries: int, error: StoreError) -> None:
            trouble.write_text(f" (try {tries + 1}, after {one_line(error)})")

        with _locked(self._folder / f"{int(group.name, 16) % _LOCKS}.lock"):
            if file.exists():
                return
            if failed.exists() and failed.stat().st_mtime > since:
                raise StoreError(failed.read_text())
            try:
                _write(file, group.file.read(group.number, self._columns, on_retry=report))
            except StoreError as error:
                failed.write_text(str(error))
                raise
            finally:
                self.release(group)
                trouble.unlink(missing_ok=True)

    def release(self, group: RowGroup) -> None:
        """Give up the room that was claimed for a group."""
        self._file(group, _BEGUN).unlink(missing_ok=True)

    def keeps(self, group: RowGroup) -> bool:
        """Return whether the file of a group is there."""
        return self._file(group, _MADE).exists()

    def claim(self, plan: str, steps: Mapping[RowGroup, int]) -> list[RowGroup]:
        """Publish what a rank needs; return the groups for which there is room, to be made by it.

        What no plan needs makes room first, by the time of its last use; then what is needed later,
        the farthest use first (Belady 1966).

        Args:
            plan: a name of the plan.
            steps: the step of the next use of each group.
        """
        with _locked(self._folder / "room.lock"):
            with replacing(self._folder / f"{plan}{_PLAN}") as draft:
                draft.write_text(json.dumps({group.name: step for group, step in steps.items()}))
            room = self._look()
            total = sum(room.sizes.values())
            # A group that several ranks need counts for each of them in part.
            share = 0.0
            for group in steps:
                share += room.sizes.get(group.name, 0) / room.users[group.name]

            claimed = []
            for group in sorted(steps, key=steps.__getitem__):
                part = group.size / room.users[group.name]
                # A rank that begins early must not use up the budget of the others.
                if group.name in room.sizes or share + part > self._budget / local_ranks():
                    continue

                # Choose what makes room: nothing that is needed before this group.
                needed_at = room.next_use[group.name]
                missing = total + group.size - self._budget
                dropped = 0
                for name in room.droppable:
                    if missing <= 0 or room.next_use.get(name, math.inf) <= needed_at:
                        break
                    missing -= room.sizes[name]
                    dropped += 1
                if missing > 0:
                    break
                for name in room.droppable[:dropped]:
                    total -= room.sizes[name]
                    (self._folder / f"{name}{_MADE}").unlink()
                del room.droppable[:dropped]

                with self._file(group, _BEGUN).open("wb") as begun:
                    begun.truncate(group.size)
                total += group.size
                share += part
                claimed.append(group)
            return claimed

    def end_plan(self, plan: str) -> None:
        """Forget a plan."""
        (self._folder / f"{plan}{_PLAN}").unlink(missing_ok=True)

    def waits(self) -> str:
        """Return what processes of this run wait for, and why; empty if they do not wait long."""
        with suppress(OSError):
            for file in self._folder.glob(f"*{_WAITS}"):
                if time.time() - file.stat().st_mtime > _SLOW:
                    trouble = self._folder / f"{file.name.partition('-')[0]}{_TROUBLE}"
                    why = trouble.read_text() if trouble.exists() else ""
                    return file.read_text() + why
        return ""

    def _open(self) -> None:
        """Make the folder, unless this process has done so; remove those of runs that have ended.

        The folder is locked until the last process that uses it ends.
        """
        if self._user == os.getpid():
            return
        with alone(f"{_FOLDER}/folders"):
            _remove_unused()
            self._folder.mkdir(exist_ok=True)
            lock = (self._folder / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_SH)
        self._user = os.getpid()
        weakref.finalize(self, _close, lock, self._user)

    def _drop_spare(self) -> None:
        """Drop what no plan needs if the budget is exceeded, but not the newest groups."""
        with _locked(self._folder / "room.lock"):
            room = self._look()
            total = sum(room.sizes.values())
            spare = [name for name in room.droppable if name not in room.next_use]
            for name in spare[:-_NEWEST]:
                if total > self._budget:
                    total -= room.sizes[name]
                    (self._folder / f"{name}{_MADE}").unlink()

    def _file(self, group: RowGroup, end: str) -> Path:
        return self._folder / f"{group.name}{end}"

    def _look(self) -> "_Room":
        """Return what the folder holds, and what its plans need."""
        room = _Room()
        used = {}
        for entry in os.scandir(self._folder):
            name, end = os.path.splitext(entry.name)
            # Another process may remove or complete it now.
            with suppress(FileNotFoundError):
                if end == _PLAN:
                    for group, step in json.loads(Path(entry).read_text()).items():
                        room.next_use[group] = min(step, room.next_use.get(group, step))
                        room.users[group] += 1
                if end in (_MADE, _BEGUN):
                    about = entry.stat()
                    room.sizes[name] = about.st_size
                    if end == _MADE:
                        used[name] = about.st_mtime

        # What no plan needs comes first, by its last use; then the farthest use.
        def rank(name: str) -> tuple[float, float]:
            return -room.next_use.get(name, math.inf), used[name]

        room.droppable = sorted(used, key=rank)
        return room


def _write(file: Path, table: Any) -> None:
    """Write a group's file, as blocks that need no copy when they are mapped."""
    import pyarrow

    with (
        replacing(file) as draft,
        pyarrow.OSFile(str(draft), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock a file. (FileLock looks only every 50 ms whether it can.)"""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that was forked meanwhile has a copy of the stream.
            fcntl.flock(stream, fcntl.LOCK_UN)


def _remove_unused() -> None:
    """Remove the folders that no process uses."""
    for folder in (cache_folder() / _FOLDER).iterdir():
        if folder.is_dir():
            with suppress(BlockingIOError), (folder / "lock").open("w") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete(folder, inside=folder.parent)


def _close(lock: IO[str], user: int) -> None:
    """Let a folder go that a process has used; remove it if no other one uses it."""
    if user == os.getpid():
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()
        with suppress(OSError, ValueError), alone(f"{_FOLDER}/folders"):
            _remove_unused()
