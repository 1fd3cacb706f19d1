"""The warm server: one process of the suite, from which all others are forked.

It has imported what runs need (``warm.py``), which takes ten seconds. The worker processes of
pytest-xdist are forked from it (``forked_interpreter.py``), and so are the worlds that they start.
It ends with the process that started the suite.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "ONELOOP_TESTS_SERVER"  # variable: the folder of the server's socket
_LENGTH = struct.Struct("!Q")  # of a request, in bytes
_PID = struct.Struct("!i")
_END = struct.Struct("!id")  # exit code and CPU seconds of a process
_SECONDS = 1.0  # between two looks at the process that started the suite
_STARTED: list[subprocess.Popen[bytes]] = []  # the server, if this process has started it


def new_folder() -> None:
    """Let this process, and those that inherit its environment, use a new server.

    It ends when this process ends and removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="worlds-"))
    owner = os.getpid()
    (folder / "owner").write_text(str(owner))
    os.environ[FOLDER] = str(folder)

    def remove() -> None:
        if os.getpid() == owner:  # not in a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


class Forked:
    """A process that is forked from the server.

    Args:
        function: what to call in it; a function of a module.
        arguments: its arguments, which pickle can send.
        files: descriptors of its standard input, output and error; by default those of the server.
    """

    def __init__(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        files: Sequence[int] = (),
    ) -> None:
        # The new process finds the modules of this one, and its main module.
        place = spawn.get_preparation_data("world")
        place.pop("authkey")
        request = pickle.dumps((place, pickle.dumps((function, arguments))))
        self.exitcode: int | None = None
        self.cpu_seconds = 0.0
        self._connection = _connected()
        socket.send_fds(self._connection, [_LENGTH.pack(len(request))], files)
        self._connection.sendall(request)
        (self.pid,) = _PID.unpack(_received(self._connection, _PID.size))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, at most so long (None: without a limit)."""
        if self.exitcode is not None:
            return
        self._connection.settimeout(seconds)
        try:
            end = _received(self._connection, _END.size)
        except TimeoutError:
            return
        self.exitcode, self.cpu_seconds = _END.unpack(end)
        self._connection.close()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        self.join(60.0)


def _received(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = connection.recv(count - len(content))
        if not more:
            raise ConnectionError("the server of the worlds has ended")
        content += more
    return content


def _connected() -> socket.socket:
    """Return a connection to the server. The first call starts it."""
    if FOLDER not in os.environ:  # outside of pytest
        new_folder()
    folder = Path(os.environ[FOLDER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            command = [sys.executable, __file__, str(folder)]
            # The output of a worker is a pipe, which must end with the worker.
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            _STARTED.append(server)
        while not (folder / "socket").exists():
            time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / "socket"))
    return connection


def serve(folder: Path) -> None:
    """Fork a process for each request, and report its end, until the suite has ended."""
    owner = int((folder / "owner").read_text())

    # Requests wait until the imports are done.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "bound"))
    listener.listen(128)
    (folder / "bound").rename(folder / "socket")
    import warm  # noqa: F401

    # The end of a process wakes the selector.
    waking, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(waking, selectors.EVENT_READ)

    running: dict[int, socket.socket] = {}
    while folder.exists() and _runs(owner):
        for key, _ in selector.select(_SECONDS):
            if key.fileobj is waking:
                waking.recv(4096)
                continue
            connection, _ = listener.accept()
            with suppress(OSError, struct.error):  # the test has given up
                header, files, *_ = socket.recv_fds(connection, _LENGTH.size, 3)
                (length,) = _LENGTH.unpack(header)
                request = _received(connection, length)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, signal.SIGINT):
                        signal.signal(number, signal.SIG_DFL)
                    for one in (listener, waking, woken, connection, selector, *running.values()):
                        one.close()
                    _call(request, files)
                for number in files:
                    os.close(number)
                running[pid] = connection
                connection.sendall(_PID.pack(pid))
        _report_ends(running)
    os._exit(0)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _report_ends(running: dict[int, socket.socket]) -> None:
    """Send exit code and CPU seconds of each process that has ended."""
    while running:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        end = _END.pack(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        with running.pop(pid) as connection, suppress(OSError):
            connection.sendall(end)


def _call(request: bytes, files: Sequence[int]) -> NoReturn:
    """Call the function of a request in this new process, and end."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        place, call = pickle.loads(request)
        spawn.prepare(place)
        function, arguments = pickle.loads(call)
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
