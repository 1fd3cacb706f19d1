"""The side of the fetcher's clients: training processes and their data workers."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from xxhash import xxh3_64_hexdigest

import oneloop
from oneloop.basics.files import cache_folder, replacing
from oneloop.basics.launcher import local_ranks
from oneloop.basics.untrusted import delete
from oneloop.tasks.rows.cache import alone
from oneloop.tasks.rows.remote.fetch_plan import NeededGroups
from oneloop.tasks.rows.remote.handshake import prove
from oneloop.tasks.rows.remote.range_file import GroupRequest

_FOLDER = "row_groups"
_LAUNCHER = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""variables that all processes of a run on a host have in common"""
_TRIES = 10
_START = 60.0  # seconds in which a fetcher starts


class FetchClient:
    """A connection of this process to the fetcher of its run on this host, which it may start.

    It can be pickled, and used after a fork: each process connects by itself. Processes of one
    launcher, and the data workers of a process, have the same fetcher.
    """

    def __init__(self) -> None:
        words = [os.environ.get(name, "") for name in _LAUNCHER]
        if local_ranks() < 2:
            words = [str(os.getpid()), str(time.time_ns())]
        self.run = xxh3_64_hexdigest(" ".join([socket.gethostname(), *words]).encode())
        self._forget()

    def _forget(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._paths: dict[GroupRequest, str] = {}  # of the groups that this process has mapped

    def __getstate__(self) -> dict[str, Any]:
        return {"run": self.run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        self._forget()

    def get(self, request: GroupRequest) -> Any:
        """Return a row group as a ``pyarrow.Table``, mapped from the fetcher's file; wait for it.

        Raises:
            StoreError: the store fails.
            ValueError: the group cannot be decoded, or the disk is full.
            RuntimeError: the fetcher has ended.
        """
        import pyarrow

        if self._owner != os.getpid():
            self._forget()
        with self._lock:
            if self._connection is None:
                self._connection = connected(self.run)
            for _ in range(_TRIES):
                answer = _asked(self._connection, request)
                if isinstance(answer, Exception):
                    raise answer
                # The fetcher may have dropped the file since it answered.
                with suppress(FileNotFoundError):
                    self._paths[request] = answer
                    return pyarrow.ipc.open_file(pyarrow.memory_map(answer)).read_all()
        raise RuntimeError(
            f"{request.address}: the fetcher has dropped row group {request.group} of "
            f"{request.item.name} {_TRIES} times before it was read; set a larger task.window"
        )

    def keeps(self, request: GroupRequest) -> bool:
        """Return whether the fetcher still has the file of a group that this process has mapped."""
        if os.path.exists(self._paths.get(request, "")):
            return True
        self._paths.pop(request, None)
        return False

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python exits, the modules that this needs are gone; the connection ends by itself.
        if at_exit():
            return
        # Processes that were forked since then may hold a copy of the connection.
        if self._owner == os.getpid() and self._connection is not None:
            with suppress(OSError):
                self._connection.send((None, ()))

    def waits(self) -> str:
        """Return what processes of this run wait for, and why; empty if they do not wait long."""
        try:
            about = json.loads(_pointer(self.run).read_text())
            return (Path(about["folder"]) / "waits.txt").read_text()
        except (OSError, ValueError):
            return ""


def _asked(connection: Connection, request: GroupRequest) -> Any:
    with suppress(EOFError, OSError):
        connection.send((request, ()))
        return connection.recv()
    # outside of the handler: the error of the connection would count as a consequence of another
    return RuntimeError(
        f"{request.address}: the process that fetches row groups has ended, for which a signal or "
        "a lack of memory may be the cause; start the same command again"
    )


class AnnouncedPlan:
    """Lets the fetcher know ahead which groups this rank will need. A thread computes them.

    Args:
        client: of the data set.
        needed: the groups.
        request_of: returns the request for a group, by its number.
    """

    def __init__(
        self,
        client: FetchClient,
        needed: NeededGroups,
        request_of: Callable[[int], GroupRequest],
    ) -> None:
        self._needed = needed
        self._request_of = request_of
        self._step: int | None = 0
        self._moved = threading.Event()
        self._connection = connected(client.run)
        threading.Thread(target=self._send, name="oneloop-plan", daemon=True).start()

    def advance(self, step: int) -> None:
        """Report the first step whose samples were not read yet, counted from the start."""
        self._step = step
        self._moved.set()

    def close(self) -> None:
        """Drop the plan."""
        self._step = None
        self._moved.set()

    def _send(self) -> None:
        """Send what changes. Runs in a thread."""
        # If the fetcher has ended, the next read of a sample raises.
        with suppress(OSError), self._connection:
            while (step := self._step) is not None:
                changed, removed = self._needed.advance(step)
                if changed or removed:
                    wanted = {self._request_of(group): first for group, first in changed.items()}
                    self._connection.send((wanted, [*map(self._request_of, removed)]))
                if self._needed.complete(step):
                    self._moved.wait()
                    self._moved.clear()
            self._connection.send((None, ()))


def connected(run: str) -> Connection:
    """Connect to the fetcher of a run on this host; start it if there is none.

    Raises:
        ValueError: the cache cannot be written.
        RuntimeError: it does not start.
    """
    silent = ""  # describes a fetcher that has gone, or does not answer
    pointer = _pointer(run)
    for _ in range(_TRIES):
        with alone(f"{_FOLDER}/fetchers"):
            if not pointer.exists() or pointer.read_text() == silent:
                _start(run)
            silent = pointer.read_text()
        # Other runs start meanwhile.
        with suppress(OSError, ValueError, EOFError, AssertionError, AuthenticationError):
            return _opened(json.loads(silent))
    raise RuntimeError(
        "the process that fetches row groups does not answer; start the same command again"
    )


def _opened(about: dict[str, Any]) -> Connection:
    key = (Path(about["folder"]) / "key").read_bytes()
    connection = Client(("127.0.0.1", about["port"]))
    prove(connection, key, accepted=False)
    return connection


def _pointer(run: str) -> Path:
    """Return the file that says where the fetcher of a run is."""
    return cache_folder() / _FOLDER / f"{run}.json"


def _start(run: str) -> None:
    """Start a fetcher; remove what killed ones have left."""
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(dir=_pointer(run).parent.absolute(), prefix=f"{run}-"))
    (folder / "key").write_bytes(secrets.token_bytes(32))

    # Its working folder has no modules of the user, which could hide others.
    root = str(Path(oneloop.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "oneloop.tasks.rows.remote.fetcher", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=variables,
            start_new_session=True,  # Ctrl-C ends the run, and the fetcher after it
        )
    assert process.stdout is not None
    with process.stdout as stdout:
        port = stdout.readline() if wait([stdout.fileno()], _START) else b""
    if not port:
        process.kill()
        process.wait()
        why = (folder / "errors.txt").read_text().strip().splitlines()[-1:]
        delete(folder, inside=folder.parent)
        raise RuntimeError(f"the process that fetches row groups does not start: {' '.join(why)}")
    process.returncode = 0  # it outlives this process, about which Python would warn

    about = {"folder": str(folder), "port": int(port)}
    with replacing(_pointer(run)) as draft:
        draft.write_text(json.dumps(about))


def _remove_leftovers() -> None:
    """Remove the folders of fetchers that have ended, which they hold a lock in."""
    for folder in (cache_folder() / _FOLDER).iterdir():
        if folder.is_dir():
            with suppress(Timeout, FileNotFoundError), FileLock(folder / "lock", timeout=0):
                delete(folder, inside=folder.parent)
        elif folder.suffix == ".json" and not _leads_somewhere(folder):
            folder.unlink(missing_ok=True)


def _leads_somewhere(pointer: Path) -> bool:
    with suppress(OSError, ValueError, KeyError):
        return Path(json.loads(pointer.read_text())["folder"]).is_dir()
    return False
