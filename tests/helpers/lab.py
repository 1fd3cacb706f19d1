"""Nodes of a run on one machine: processes of ``oneloop launch``, on loopback or in network
namespaces (needs root)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TASK = '''
import time
from oneloop.tasks.image_classification import ImageClassification


class Slow(ImageClassification):
    """The digits, with at least {seconds} s per micro-batch; a rank hangs after a file "hang-RANK" appears."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(data="digits", width=width)

    def loss(self, model, batch):
        import os, pathlib
        while model.training and pathlib.Path(f"hang-{{os.environ.get('RANK')}}").exists():
            time.sleep(0.1)
        if model.training:
            time.sleep({seconds})
        return super().loss(model, batch)
'''  # noqa: E501
KEYS = (
    "--batch.size 64 --batch.micro 16 --save.every 10 --save.keep 50 --log.every 5 --track none "
    "--eval.every 0"
)


NODES: list[Node] = []  # all that were started; a test kills them at its end


class Node:
    """One ``oneloop launch`` in a session of its own, with the times of its output. ``space``:
    network namespace. ``mounts``: shell commands that change what this node sees of the file system
    (needs root)."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        space: int | None = None,
        command: str = "launch",
        mounts: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.space, self.lines, self.began = space, list[tuple[float, str]](), time.monotonic()
        inside = ["ip", "netns", "exec", f"h{space}"] if space else []
        inside += (
            ["unshare", "--mount", "bash", "-c", f'{mounts} && exec "$@"', "bash"] if mounts else []
        )
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": f"v{space}"} if space else {}
        environment |= variables or {}
        command = [*inside, sys.executable, "-m", "oneloop", command, *words]
        how = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **how)
        NODES.append(self)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def processes(self) -> list[int]:
        """Return the ids of all running processes of this node."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,stat=", "-s", str(self.process.pid)], capture_output=True, text=True
        )
        rows = [line.split() for line in listed.stdout.splitlines()]
        found = {int(pid) for pid, state in rows if not state.startswith("Z")}
        return sorted(found | set(self._below(self.process.pid)))

    def _below(self, pid: int) -> Iterator[int]:
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in map(int, file.read_text().split()):
                    yield child
                    yield from self._below(child)

    def running(self, word: str) -> list[int]:
        """Return the processes whose command line contains the word."""
        found = []
        for pid in self.processes():
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    found.append(pid)
        return found

    def agent(self) -> int:
        """Return the id of the elastic agent."""
        return self.running("-m oneloop.tools.elastic.elastic")[0]

    def trainers(self) -> list[int]:
        """Return the ids of the training processes (the children of their supervisors)."""
        workers = self.running("-m oneloop.train")
        return [
            pid
            for pid in workers
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in workers
        ]

    def kill(self) -> None:
        """Kill every process of this node at once."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ended(self, seconds: float = 120.0) -> int:
        """Wait for the end; return the exit code. No process may be left."""
        code = self.process.wait(seconds)
        until = time.monotonic() + 5
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)
        assert not self.processes(), self.output
        return code


def when(nodes: Sequence[Node], *words: str, since: float = 0.0, seconds: float = 120.0) -> float:
    """Wait for a line of any node that contains one of the words, printed after ``since``; return
    its time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = [
            at
            for node in nodes
            for at, line in list(node.lines)
            if at > since and any(w in line for w in words)
        ]
        if found:
            return min(found)
        time.sleep(0.05)
    raise AssertionError(
        f"no {words} in {seconds:.0f} s:\n" + "\n\n".join(node.output for node in nodes)
    )


def until(file: Path, seconds: float = 120.0) -> None:
    """Wait until the file or folder exists."""
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"no {file}:\n" + "\n\n".join(node.output for node in NODES)
        time.sleep(0.05)


def until_true(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "\n\n".join(node.output for node in NODES)
        time.sleep(0.05)


def written_task(folder: Path, seconds: float = 0.05) -> str:
    """Write the slow task into the folder; return its name."""
    (folder / "slow.py").write_text(TASK.format(seconds=seconds))
    return "slow.py:Slow"


def gone(pids: Sequence[int], seconds: float = 120.0) -> float:
    """Wait until these processes have ended; return the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        if not any(file.exists() and _state(file) != "Z" for file in states):
            return time.monotonic()
        time.sleep(0.05)
    raise AssertionError(f"processes {pids} have not ended in {seconds:.0f} s")


def _state(file: Path) -> str:
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def why_no_namespaces() -> str | None:
    """Return why network namespaces cannot be made here; None if they can."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root and the command ip (iproute2)"
    made = subprocess.run(["ip", "netns", "add", "try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "try"], capture_output=True)
    return f"network namespaces cannot be made: {made.stderr.strip()}" if made.returncode else None


def clock_off(folder: Path, seconds: int) -> dict[str, str]:
    """Return the variables of a host whose clock is off. Write another number into the file
    ``clock`` to change it."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (folder / "clock").write_text(str(seconds))
    return {"LD_PRELOAD": str(library), "CLOCK_OFF": str(folder / "clock")}


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make two network namespaces, h1 (10.77.0.1) and h2 (10.77.0.2), with a link between them."""

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    for space in ("h1", "h2"):
        subprocess.run(["ip", "netns", "del", space], capture_output=True)
        ip(f"netns add {space}")
    try:
        ip("link add v1 type veth peer name v2")
        for number in (1, 2):
            ip(f"link set v{number} netns h{number}")
            for words in (
                f"addr add 10.77.0.{number}/24 dev v{number}",
                "link set lo up",
                f"link set v{number} up",
            ):
                ip(f"-n h{number} {words}")
        yield
    finally:
        for space in ("h1", "h2"):
            listed = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True
            ).stdout.split()
            for pid in map(int, listed):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def link(state: str) -> None:
    """Set the link between the two hosts "up" or "down"."""
    subprocess.run(["ip", "-n", "h1", "link", "set", "v1", state], check=True)


def cut(here: int) -> None:
    """Lose what a host sends to the other one: with a wrong address of its network card."""
    wrong = f"neigh replace 10.77.0.{3 - here} lladdr 02:00:00:00:00:99 dev v{here} nud permanent"
    subprocess.run(["ip", "-n", f"h{here}", *wrong.split()], check=True)


CASES = (
    "link cut",
    "host killed",
    "store killed",
    "host added",
    "agent killed",
    "rank killed",
    "rank hanging",
)


@dataclass
class Outcome:
    """Seconds after a fault: until it was reported, until the processes that it concerns ended,
    until the first new step (None: the run ends, as it must)."""

    reported: float
    ended: float
    first_step: float | None
    resumed: int | None  # step of the checkpoint
    codes: list[int]
    output: str


def fault(case: str, folder: Path, keys: str, *, port: int = 29400) -> Outcome:
    """Train on two hosts, cause one fault after the first checkpoint, and wait for the end. No
    process may be left."""
    words = (
        f"--nodes 1:2 --rendezvous 10.77.0.1:{port} --max_restarts 3 --config_file ddp {keys} "
        "--run.dir run".split()
    )
    nodes = [Node(words, folder, space=1)]
    if case != "host added":
        nodes.append(Node(words, folder, space=2))
    until(folder / "run" / "checkpoints" / "step-00000020")
    concerned = [pid for node in nodes for pid in node.running("-m oneloop.train")]
    second, began = nodes[-1], time.monotonic()
    if case == "link cut":
        concerned += second.processes()
        link("down")
    elif case == "host killed":
        second.kill()
    elif case == "store killed":
        concerned += second.processes()
        nodes[0].kill()
    elif case == "host added":
        nodes.append(Node(words, folder, space=2))
    elif case == "agent killed":
        concerned += second.processes()
        os.kill(second.agent(), signal.SIGKILL)
    elif case == "rank killed":
        os.kill(second.trainers()[0], signal.SIGKILL)
    else:
        (folder / "hang-1").touch()
    try:
        named = (
            "oneloop: error: rank",
            "oneloop: error: the launcher of rank",
            "oneloop: a node joins",
        )
        reported = when(nodes, *named, since=began) - began
        (folder / "hang-1").unlink(missing_ok=True)
        ended = gone(concerned) - began
        first_step = resumed = None
        if case != "store killed":
            at = when(nodes, "resuming from", since=began)
            line = next(line for node in nodes for when_, line in node.lines if when_ == at)
            resumed = int(line.rpartition("-")[2])
            first_step = when(nodes, "step ", since=at) - began
        codes = [node.ended(120) for node in nodes]
    finally:
        link("up")
    return Outcome(
        reported, ended, first_step, resumed, codes, "\n\n".join(node.output for node in nodes)
    )
