"""The process that fetches row groups for all processes of a run on this host.

Each group becomes an Arrow file, which the processes map into their memory. The process ends, and
removes these files, when the last connection to it has closed.
"""

import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from contextlib import suppress
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from filelock import FileLock

from oneloop.basics.bucket import StoreError
from oneloop.basics.files import one_line, replacing, writing
from oneloop.basics.launcher import local_ranks
from oneloop.basics.system.signals import on_stops
from oneloop.tasks.rows.remote.fetch_room import FetchJob, Room, pool_of
from oneloop.tasks.rows.remote.footers import Footer, footers
from oneloop.tasks.rows.remote.handshake import prove
from oneloop.tasks.rows.remote.open_store import open_store
from oneloop.tasks.rows.remote.range_file import GroupRequest, decoded
from oneloop.tasks.rows.remote.store import RemoteObject, RemoteStore

# Requests at the same time. S3 sends 60 to 90 MB/s on a connection, so 16 fill 1 GB/s. At a
# latency of 50 ms, 50 MB must be under way for that: 16 requests of 3 MB or more.
_THREADS = 16
_RANKS = local_ranks()  # of this run on this host
_FOOTERS = 64  # that stay parsed
_URGENT = -1  # priority of a group that a process waits for; others have their step
_NO_CLIENT = 2.0  # seconds without a connection after which the fetcher ends
_FIRST_CLIENT = 60.0  # seconds until the first connection
_SLOW = 1.0  # seconds of waiting after which it is reported

WAITS = "waits.txt"  # file with what processes wait for


class _Fetcher:
    """Fetches groups with threads: those that a process waits for first, then those of the plans.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a job has ended
        self._queued = threading.Condition(self._lock)
        # by request, the one that was used last at the end
        self._jobs: OrderedDict[GroupRequest, FetchJob] = OrderedDict()
        # step of the first use of each needed group, by connection
        self._plans: dict[int, dict[GroupRequest, int]] = {}
        self._queue: list[tuple[int, int, FetchJob, int]] = []  # a heap
        self._numbers = count()
        self._current = threading.local()  # the job of a thread
        self.clients = 0
        self.closed_at = time.monotonic() + _FIRST_CLIENT
        self._store = lru_cache(maxsize=None)(self._opened)
        # Parsing a large footer for each of its groups would be slow.
        self._footer = lru_cache(maxsize=_FOOTERS)(_footer_of)
        self._opening = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def serve(self, connection: Connection) -> None:
        """Answer the requests of one process until it closes its connection. Runs in a thread."""
        plan: dict[GroupRequest, int] = {}
        with self._lock:
            self.clients += 1
            self._plans[id(connection)] = plan
        with suppress(EOFError, OSError), connection:
            while True:
                wanted, removed = connection.recv()
                if isinstance(wanted, GroupRequest):
                    connection.send(self._answer(wanted))
                    continue
                if wanted is None:
                    break
                with self._lock:
                    plan.update(wanted)
                    for request in removed:
                        plan.pop(request, None)
                    self._schedule()
        with self._lock:
            del self._plans[id(connection)]
            self.clients -= 1
            self.closed_at = time.monotonic() + _NO_CLIENT

    def _answer(self, request: GroupRequest) -> str | Exception:
        """Return the path of a group's file, or why it cannot be fetched."""
        with self._lock:
            job = self._jobs.get(request)
            # Try again what failed when no process needed it.
            if job is None or job.error:
                job = self._begin(request, _URGENT)
            elif not job.ended:
                self._push(job, _URGENT)
            self._jobs.move_to_end(request)
            began = time.monotonic()
            job.waiting.append(began)
            self._ended.wait_for(lambda: job.ended)
            job.waiting.remove(began)
            self._schedule()
            return str(job.path) if job.error is None else job.error

    def _schedule(self) -> None:
        """Begin what the plans need next, as far as the budget allows; drop what makes room."""
        next_use: dict[GroupRequest, int] = {}
        users: defaultdict[GroupRequest, list[int]] = defaultdict(list)
        for number, plan in self._plans.items():
            for request, step in plan.items():
                next_use[request] = min(step, next_use.get(request, step))
                users[request].append(number)
        room = Room(self._jobs.values(), next_use, users)

        full = set[Any]()
        for request in sorted(next_use, key=next_use.__getitem__):
            pool = pool_of(request)
            if request in self._jobs or pool in full:
                continue
            # A rank that begins early must not use up the budget of the others.
            if room.share_with(request) > request.budget / _RANKS:
                continue
            dropped = room.make(request)
            if dropped is None:
                full.add(pool)
                continue
            for job in dropped:
                self._drop(job)
            self._begin(request, next_use[request])
            room.take(request)

        for job in room.over():
            self._drop(job)

    def _drop(self, job: FetchJob) -> None:
        """Remove a group."""
        del self._jobs[job.request]
        if job.path is None:
            job.begun.update(range(-1, len(job.ranges)))  # no thread begins it
        else:
            job.path.unlink(missing_ok=True)

    def _begin(self, request: GroupRequest, priority: int) -> FetchJob:
        job = self._jobs[request] = FetchJob(request)
        self._push(job, priority)
        return job

    def _push(self, job: FetchJob, priority: int) -> None:
        """Queue what is left to do for a group; what is queued twice is done once."""
        for number in range(len(job.ranges)) if job.footer else [-1]:
            heappush(self._queue, (priority, next(self._numbers), job, number))
            self._queued.notify()

    def _work(self) -> None:
        """Do what is queued. Runs in a thread."""
        while True:
            with self._lock:
                self._queued.wait_for(lambda: self._queue)
                priority, _, job, number = heappop(self._queue)
                if number in job.begun or job.error:
                    continue
                job.begun.add(number)
            self._current.job = job
            try:
                self._do(job, number, priority)
            except Exception as error:
                with self._lock:
                    job.error = _sendable(error)
                    job.parts.clear()
                    self._ended.notify_all()

    def _do(self, job: FetchJob, number: int, priority: int) -> None:
        """Fetch the footer or a range of a group; after the last one, write the file."""
        request = job.request
        with self._opening:
            store = self._store(request.address)
        if number < 0:
            footer = self._footer(store, request.item)
            with self._lock:
                job.footer = footer
                job.ranges = footer.ranges(request.group, request.columns)
                self._push(job, _URGENT if job.waiting else priority)
            return

        start, end = job.ranges[number]
        content = store.read(request.item, start, end)
        with self._lock:
            job.parts[start] = content
            if len(job.parts) < len(job.ranges):
                return
        table = decoded(request, store.where(request.item), job.footer.metadata, job.parts)
        path = self._written(table)
        with self._lock:
            job.parts.clear()
            job.path = path
            job.size = max(job.size, path.stat().st_size)
            self._ended.notify_all()
            self._schedule()

    def _written(self, table: Any) -> Path:
        """Write a group's file, as blocks that need no copy when they are mapped."""
        import pyarrow

        path = self._folder / f"{next(self._numbers)}.arrow"
        remedy = (
            f"a row group has {table.nbytes / 2**20:,.1f} MB: make room, set ONELOOP_CACHE to a "
            "folder on another disk, or set a smaller task.window in a new run"
        )
        with (
            writing(self._folder.parent, remedy, only_full=True),
            replacing(path) as draft,
            pyarrow.OSFile(str(draft), "wb") as sink,
            pyarrow.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        return path

    def _opened(self, address: str) -> RemoteStore:
        store = open_store(address)
        store.on_retry = self._note
        return store

    def _note(self, tries: int, error: StoreError) -> None:
        """Remember the error of a read that is tried again."""
        self._current.job.trouble = f"try {tries + 1}, after {one_line(error)}"

    def report(self) -> None:
        """Write what processes wait for to a file, if they wait for long."""
        file = self._folder / WAITS
        now = time.monotonic()
        with self._lock:
            waits = []
            for job in self._jobs.values():
                if job.waiting and now - min(job.waiting) > _SLOW:
                    waits.append(_described(job))
        if waits:
            with suppress(OSError), replacing(file) as draft:
                draft.write_text(waits[0])
        else:
            file.unlink(missing_ok=True)


def _footer_of(store: RemoteStore, item: RemoteObject) -> Footer:
    return footers(store, [item])[0]


def _described(job: FetchJob) -> str:
    where = f"{job.request.address}: {job.request.item.name}, row group {job.request.group}"
    return f", which waits for {where}" + (f" ({job.trouble})" if job.trouble else "")


def _sendable(error: Exception) -> Exception:
    """Return the error, or its words if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _accept(listener: Listener, fetcher: _Fetcher, key: bytes) -> None:
    """Accept connections. Runs in a thread."""

    # A stranger may connect, and say nothing: no other process waits for it.
    def serve(connection: Connection) -> None:
        with suppress(Exception):
            prove(connection, key, accepted=True)
            fetcher.serve(connection)

    while True:
        # A process may end while it connects.
        with suppress(OSError):
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


def main(folder: Path) -> None:
    """Fetch row groups into a folder until no process is connected; then remove it.

    Args:
        folder: has the file ``key``, by which processes prove that they belong to this run.
    """
    # Who can take this lock knows that this process has ended.
    lock = FileLock(folder / "lock")
    lock.acquire()
    on_stops(signal.SIG_IGN)  # the run saves a checkpoint first, for which it may need data
    listener = Listener(("127.0.0.1", 0), backlog=128)
    fetcher = _Fetcher(folder)
    given = listener, fetcher, (folder / "key").read_bytes()
    threading.Thread(target=_accept, args=given, daemon=True).start()
    print(listener.address[1], flush=True)  # type: ignore[misc]  # the port
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while fetcher.clients or time.monotonic() < fetcher.closed_at:
        fetcher.report()
        time.sleep(0.2)
    # Nobody reads an error of this process. The next start deletes what is left, or reports it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    main(Path(sys.argv[1]))
