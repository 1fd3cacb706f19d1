"""One room knows the operating system; what it says about processes, files and memory."""

from __future__ import annotations

import ast
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from oneloop.basics.system import memory, processes, signals
from oneloop.checkpoint.writing_process import WritingProcess
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.basics.system",
    "oneloop.basics.system.memory",
    "oneloop.basics.system.processes",
    "oneloop.basics.system.signals",
    "oneloop.checkpoint.writing_process",
)

PACKAGE = ROOT / "src" / "oneloop"
ROOM = PACKAGE / "basics" / "system"
LINUX_CHECKS = {
    "tools/elastic/node_checks.py",
    "tools/doctor/doctor.py",
}  # checks that only Linux needs
SHARED_LOCKS = {"tasks/rows/remote/row_group_cache.py"}  # which all supported systems have

MODULES = {"resource", "fcntl", "termios", "prctl", "msvcrt", "winreg"}
NAMES = {
    "fork",
    "forkpty",
    "pread",
    "pwrite",
    "memfd_create",
    "sched_getaffinity",
    "sched_setaffinity",
    "posix_fadvise",
    "posix_spawn",
    "sendfile",
    "copy_file_range",
    "prctl",
    "tgkill",
    "getrusage",
    "SIGUSR1",
    "SIGUSR2",
    "SIGHUP",
    "preexec_fn",
    "platform",  # of sys
}


def ask_the_system(tree: ast.Module) -> Iterator[str]:
    """Yield what a file uses that only some systems have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {one.name for one in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", "signal", "sys", *MODULES}:
            yield from {one.name for one in node.names} & (NAMES | MODULES)
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            if node.attr != "platform" or ast.unparse(node.value) == "sys":
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            yield node.arg
        elif isinstance(node, ast.Constant):
            text = str(node.value)
            if text.startswith(("/proc", "/sys/")) or text in NAMES - {"platform"}:
                yield text


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os; os.fork()", ["fork"]),
        ("from os import pwrite", ["pwrite"]),
        ("import resource", ["resource"]),
        ("Popen(words, preexec_fn=begin)", ["preexec_fn"]),
        ("getattr(signal, 'SIGHUP')", ["SIGHUP"]),
        ("Path(f'/proc/{pid}/stat')", ["/proc/"]),
        ("if sys.platform == 'linux': ...", ["platform"]),
        ("environment['platform'] = platform.platform()  # /proc", []),
    ],
)
def test_the_rule_finds(code, found):
    assert [*ask_the_system(ast.parse(code))] == found


def test_no_other_file_asks_the_system():
    wrong = {}
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        if ROOM in file.parents or name in LINUX_CHECKS | SHARED_LOCKS:
            continue
        found = [*ask_the_system(ast.parse(file.read_text()))]
        if found:
            wrong[name] = found
    assert wrong == {}


def test_what_is_said_of_a_process():
    # A child with a child of its own, which works, and is then stopped.
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        "sum(i for i in range(10**7)); print(child.pid, flush=True); sys.stdin.read(); "
        "child.kill(); child.wait()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        grandchild = int(child.stdout.readline())
        assert processes.children(child.pid) == [grandchild]
        assert processes.is_python(child.pid)
        assert not processes.is_python(grandchild)
        assert processes.is_alive(child.pid)
        assert not processes.is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10
        while not processes.is_stopped(child.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert processes.is_stopped(child.pid)
    finally:
        child.send_signal(signal.SIGCONT)
        child.stdin.close()
        until = time.monotonic() + 10
        while psutil.Process(child.pid).status() != "zombie" and time.monotonic() < until:
            time.sleep(0.01)
        assert not processes.is_alive(child.pid)  # it has ended, and nobody has waited for it
        child.wait()

    # Nothing is known of a process that does not exist.
    assert not processes.is_alive(child.pid)
    assert not processes.is_stopped(child.pid)
    assert processes.children(child.pid) == []
    assert processes.is_python(child.pid)  # a launcher that cannot be examined may be one


def test_memory_of_this_process(monkeypatch):
    held = np.ones(20_000_000)  # 160 MB
    peak = memory.peak_host_memory()
    assert held.nbytes < peak < 100 * held.nbytes
    monkeypatch.setattr(memory.sys, "platform", "darwin")  # where ru_maxrss is in bytes
    assert memory.peak_host_memory() == pytest.approx(peak / 1024, rel=0.05)


def test_the_nameless_file_without_memfd(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    handle = memory.nameless_file("test")
    os.write(handle, b"12345")
    os.lseek(handle, 0, os.SEEK_SET)
    assert os.read(handle, 9) == b"12345"
    assert os.fstat(handle).st_nlink == 0  # no other process can open it
    os.close(handle)


@pytest.fixture
def many_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for handle in opened:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_open_files")
def test_the_writing_process_answers_among_1100_open_files(tmp_path):
    import torch

    process = WritingProcess("oneloop.checkpoint.writer", device=torch.device("cpu"))
    process.send({"root": str(tmp_path)})  # incomplete: the process ends with an error
    answer = process.answer(30.0)
    assert "writing process ended" in answer.error
    process.kill()


def test_stacks_are_asked_of_processes_with_a_handler_only(monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not signals.answers_with_stacks(child.pid, ours=True)
        monkeypatch.setattr(signals.sys, "platform", "darwin")
        assert signals.answers_with_stacks(child.pid, ours=True)
        assert not signals.answers_with_stacks(child.pid, ours=False)
    finally:
        child.kill()
        child.wait()


def test_the_room_names_the_cpu_and_the_boot(monkeypatch):
    assert processes.cpu_name()
    assert processes.boot_id() == processes.boot_id() != ""
    monkeypatch.setattr(processes, "_LINUX", False)
    assert processes.cpu_name()
    assert processes.boot_id() == ""  # this system has no such property, so it is unknown


def test_the_usable_cores(monkeypatch):
    assert processes.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    assert processes.usable_cores() == os.cpu_count()


def test_the_system_is_linux_here():
    assert Path("/proc/self").exists()  # the tests above compare with its answers
