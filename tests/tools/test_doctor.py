"""``oneloop doctor``: faults that it reports, and nothing on a healthy machine. Faults of hosts
need root."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import lab
from oneloop.cli import main
from oneloop.tools.elastic.node_checks import gpu_problems, local_problems, xid_errors
from worlds import free_port

pytestmark = pytest.mark.covers(
    "oneloop.launch.command",
    "oneloop.tools.nodes",
    "oneloop.run.environment",
    "oneloop.run.folder",
    "oneloop.tools.doctor.command",
    "oneloop.tools.doctor.doctor",
    "oneloop.tools.elastic.node_checks",
    "oneloop.tools.elastic.rendezvous",
)

SMALL = (
    shutil.disk_usage("/dev/shm").free < 512 << 20
    or resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1024
)
healthy = pytest.mark.skipif(SMALL, reason="this machine has a small /dev/shm, or few open files")


def _doctor(words: str, folder: Path, **how) -> lab.Node:
    how["variables"] = {"ONELOOP_CACHE": str(folder / "cache"), **how.get("variables", {})}
    return lab.Node(words.split(), folder, command="doctor", **how)


def other_version(folder: Path) -> dict[str, str]:
    """Return the variables of a host that has another version of accelerate."""
    about = folder / "other" / "accelerate-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n")
    return {"PYTHONPATH": str(folder / "other")}


@healthy
def test_a_healthy_host_has_no_problem(tmp_path):
    node = _doctor("--config_file single --json digits --run.dir new/run", tmp_path)
    assert node.ended() == 0
    found = json.loads(node.output)
    assert found["problems"] == [] and found["links"] == ""
    assert list(tmp_path.iterdir()) == []  # nothing is left


@healthy
def test_two_hosts_with_different_versions(tmp_path):
    words = f"--nodes 2 --rendezvous 127.0.0.1:{free_port()} --config_file ddp"
    nodes = [_doctor(words, tmp_path), _doctor(words, tmp_path, variables=other_version(tmp_path))]
    assert [node.ended() for node in nodes] == [1, 1]
    for node in nodes:
        (line,) = [line for _, line in node.lines if line.startswith("problem")][:-1]
        assert "accelerate is" in line and "0.0.1 on" in line and "use the same version" in line
        assert node.lines[-1][1] == "problems: 1" and "links: 2 ranks" in node.output
    assert Path(os.devnull).is_char_device() and {file.name for file in tmp_path.iterdir()} == {
        "other"
    }  # nothing else


@pytest.mark.slow
def test_a_port_that_another_program_uses(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = _doctor(f"--nodes 2 --rendezvous 127.0.0.1:{server.getsockname()[1]}", tmp_path)
        assert node.ended(120) == 1 and "choose another free port" in node.output, node.output


@pytest.mark.slow
def test_a_host_of_the_rendezvous_that_is_stopped(tmp_path):
    """The second host has joined, and waits for a third one."""
    words = f"--nodes 3 --rendezvous 127.0.0.1:{free_port()} --config_file ddp"
    nodes = [_doctor(words, tmp_path) for _ in range(2)]
    lab.until_true(lambda: any(map(_listens, nodes)))
    time.sleep(5)
    holder = next(node for node in nodes if _listens(node))
    other = next(node for node in nodes if node is not holder)
    holder.process.send_signal(signal.SIGSTOP)
    assert other.ended(120) == 1 and "no answer in 10 s" in other.output, other.output


def _listens(node: lab.Node) -> bool:
    found = psutil.Process(node.process.pid).net_connections()
    return any(one.status == psutil.CONN_LISTEN for one in found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config_file ddp digits --batch.sice 3", "did you mean 'batch.size'"),
        ("--nodes 2", "needs the address of one node"),
        ("--nonsense", "is not an option of accelerate launch"),
        ("--config_file nowhere", "--config_file nowhere cannot be read"),
    ],
)
def test_bad_input(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words.split()]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_what_nvidia_reports():
    table = (
        "0, 0, No, Not Active\n1, 3, No, Not Active\n2, 0, Yes, Active\n3, [N/A], [N/A], [N/A]\n"
    )
    assert [problem[:5] for problem in gpu_problems(table)] == ["GPU 1", "GPU 2", "GPU 2"]
    log = (
        "[1.0] NVRM: Xid (PCI:0000:65:00): 31, pid=7\n[2.0] usb 1-1: new\n[3.0] NVRM: Xid "
        "(PCI:0000:65:00): 79, lost\n"
    )
    (problem,) = xid_errors(log)
    assert "Xid 79, lost for PCI:0000:65:00" in problem


@pytest.mark.parametrize("folder", ["file", "file/inside"])
def test_a_run_folder_that_is_a_file(folder, tmp_path):
    (tmp_path / "file").touch()
    assert any(
        "file is a file; choose another run.dir" in problem
        for problem in local_problems(tmp_path / folder)
    )
    list(local_problems(tmp_path / ("x" * 300)))  # a name that is too long raises nothing


def test_an_interrupted_doctor_leaves_nothing(tmp_path):
    """The second host never comes. A stop signal ends the first at once, with its file."""
    node = _doctor(f"--nodes 2 --rendezvous 127.0.0.1:{free_port()} digits --run.dir run", tmp_path)
    lab.until_true(lambda: list(tmp_path.glob(".oneloop-*")))
    node.process.send_signal(signal.SIGINT)
    assert node.ended(120) == 130 and "Traceback" not in node.output, node.output
    assert not list(tmp_path.glob(".oneloop-*"))


# --- two hosts, with root
# -----------------------------------------------------------------------------------------

FAULTS = {  # what is changed on the second host, and what is reported
    "127.0.1.1": (
        "mount --bind hosts /etc/hosts",
        "resolves to 127.0.1.1, which no other node can reach; export GLOO",
    ),
    "full disk": (
        "mount -t tmpfs -o size=512k none run",
        "cannot be written, flushed or renamed in: No space left",
    ),
    "two run folders": ("mount -t tmpfs -o size=2g none run", "put run.dir on shared storage"),
    "small /dev/shm": (
        "mount -t tmpfs -o size=16m none /dev/shm",
        "/dev/shm has 16 MiB free; data workers",
    ),
    "another version": ("", "0.0.1 on h2"),
    "closed port": ("tcp dport 29400 drop", "check the address and the firewall"),
    "closed ports": (
        "tcp dport != 29400 ct state new drop",
        "open all TCP ports between the hosts",
    ),
    "none": ("", "no problem"),
}


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parametrize("here", [1, 2])
def test_a_link_that_is_cut(here, tmp_path):
    """Both hosts have found each other, and each waits for a third one."""
    if why := lab.why_no_namespaces():
        pytest.skip(why)
    words = "--nodes 3 --rendezvous 10.77.0.1:29400 --config_file ddp"
    with lab.two_hosts():
        nodes = [_doctor(words, tmp_path, space=space) for space in (1, 2)]
        connections = Path(f"/proc/{nodes[0].process.pid}/net/tcp")
        lab.until_true(lambda: "02004D0A:" in connections.read_text())  # host 2, in hexadecimal
        time.sleep(3)
        lab.cut(here)
        assert [node.ended(120) for node in nodes] == [1, 1]
    assert "another node did not answer" in nodes[0].output
    assert "10.77.0.1:29400 does not answer" in nodes[1].output


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_second_host(fault, tmp_path):
    if why := lab.why_no_namespaces():
        pytest.skip(why)
    change, message = FAULTS[fault]
    if fault.startswith("closed") and not shutil.which("nft"):
        pytest.skip("a firewall needs the command nft (nftables)")
    (tmp_path / "run").mkdir()
    name = socket.gethostname()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    words = "--nodes 2 --rendezvous 10.77.0.1:29400 --config_file ddp digits --run.dir run/it"
    variables = other_version(tmp_path) if fault == "another version" else {}
    variables |= {"GLOO_SOCKET_IFNAME": ""} if fault == "127.0.1.1" else {}
    with lab.two_hosts():
        if fault.startswith("closed"):
            rule = (
                f"table inet f {{ chain in {{ type filter hook input priority 0; iifname lo "
                f"accept; {change}; }}; }}"
            )
            for host in ("h1", "h2")[: 1 if fault == "closed port" else 2]:
                subprocess.run(["ip", "netns", "exec", host, "nft", rule], check=True)
        first = _doctor(words, tmp_path, space=1)
        mounts = "" if fault.startswith("closed") else change
        second = _doctor(words, tmp_path, space=2, mounts=mounts, variables=variables)
        codes = [node.ended(240) for node in (first, second)]
    expected = message.replace("h2", f"{name} (10.77.0.2)")
    assert codes == ([0, 0] if fault == "none" else [1, 1]), first.output + second.output
    assert expected in first.output + second.output, first.output + second.output
    assert ("problem: " in first.output + second.output) == (fault != "none")
