"""Each process of a run on two hosts is stopped or killed, and links are cut in one direction. All
other processes end or restart in time, with the exit code of the documentation, and a stopped one
that continues writes nothing (needs root)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import lab

pytestmark = [
    pytest.mark.covers(
        "oneloop.supervise.ranks",
        "oneloop.supervise.supervisor",
        "oneloop.tools.elastic.agent",
    ),
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.timeout(900),
]
KEYS = f"{lab.KEYS} --duration 300"
LIMIT = 30.0  # seconds in which all processes have ended or begun to restart
HOLDER = 60.0  # the same if the node of the rendezvous is stopped

ENDS = {  # the exit codes of hosts 1 (which holds the rendezvous) and 2
    "KILL launch 1": (-9, 1),
    "KILL launch 2": (0, -9),
    "KILL agent 1": (1, 1),
    "KILL agent 2": (0, 1),
    "KILL supervisor 1": (0, 0),
    "KILL supervisor 2": (0, 0),
    "KILL trainer 1": (0, 0),
    "KILL trainer 2": (0, 0),
    "STOP launch 1": (0, 0),
    "STOP launch 2": (0, 0),
    "STOP agent 1": (1, 1),
    "STOP agent 2": (0, 0),
    "STOP supervisor 1": (0, 0),
    "STOP supervisor 2": (0, 0),
    "STOP trainer 1": (0, 0),
    "STOP trainer 2": (0, 0),
    "STOP host 1": (1, 1),
    "STOP host 2": (0, 1),
    "cut 1": (0, 1),
    "cut 2": (0, 1),
    "cut both": (0, 1),
}
UNDISTURBED = ("STOP launch 1", "STOP launch 2", "STOP agent 2")  # the run goes on


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    if why := lab.why_no_namespaces():
        pytest.skip(why)
    with lab.two_hosts():
        yield
    for node in lab.NODES:
        node.kill()
    lab.NODES.clear()


def started(folder: Path, *, nodes: str = "1:2", **how) -> list[lab.Node]:
    """Start both hosts."""
    words = (
        f"--nodes {nodes} --rendezvous 10.77.0.1:29400 --max_restarts 3 --rejoin 20s "
        f"--config_file ddp {lab.written_task(folder)} {KEYS} --run.dir run"
    )
    return [lab.Node(words.split(), folder, space=space, **how) for space in (1, 2)]


def targets(node: lab.Node, role: str) -> list[int]:
    """Return the process of this role, or all of the host."""
    trainers = node.trainers()
    return {
        "launch": [node.process.pid],
        "agent": [node.agent()],
        "supervisor": [pid for pid in node.running("-m oneloop.train") if pid not in trainers],
        "trainer": trainers,
        "host": node.processes(),
    }[role]


def files(folder: Path) -> dict[str, int]:
    """Return the times of all files."""
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


def settled(nodes: list[lab.Node], concerned: list[int], since: float, limit: float) -> float:
    """Wait until these processes have ended, and each host that runs has started others; return
    the seconds."""
    lab.gone(concerned, limit)
    for node in nodes:
        lab.until_true(
            lambda node=node: node.process.poll() is not None or node.trainers(),
            limit - (time.monotonic() - since),
        )
    return time.monotonic() - since


@pytest.mark.parametrize("case", ENDS)
def test_every_process_ends_or_restarts(case, tmp_path):
    what, *where = case.split()
    nodes = started(tmp_path)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000020")
    trainers = [pid for node in nodes for pid in node.running("-m oneloop.train")]
    began, hit = time.monotonic(), list[int]()

    # Cause the fault. The stopped host, and the host of a stopped or killed launcher, are not
    # waited for.
    others = list(nodes)
    if case == "cut both":
        lab.link("down")
    elif what == "cut":
        lab.cut(int(where[0]))
    else:
        role, host = where[0], nodes[int(where[1]) - 1]
        hit = targets(host, role)
        if role in ("launch", "host"):
            others.remove(host)
        for pid in hit:
            os.kill(pid, getattr(signal, f"SIG{what}"))

    # All others end or restart in time.
    limit = HOLDER if case in ("STOP agent 1", "STOP host 1") else LIMIT
    if case not in UNDISTURBED:
        concerned = [pid for pid in trainers if what != "STOP" or pid not in hit]
        print(f"{case}: {settled(others, concerned, began, limit):.1f} s")
    for node in others:
        node.process.wait(150)
    print(f"{case}: ended after {time.monotonic() - began:.1f} s")

    # What continues afterwards ends, and writes nothing.
    before = files(tmp_path / "run")
    for pid in hit:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    lab.link("up")
    codes = tuple(node.ended(LIMIT) for node in nodes)
    output = "\n\n".join(node.output for node in nodes)
    assert codes == ENDS[case], output
    if what == "STOP" and case not in UNDISTURBED:
        assert files(tmp_path / "run") == before, output
    assert "Traceback" not in output and "fewer than 1 nodes" not in output, output
