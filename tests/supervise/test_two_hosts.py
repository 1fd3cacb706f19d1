"""Faults of a run on two hosts: network namespaces of this machine, with a link that can be cut
(needs root)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lab

pytestmark = [
    pytest.mark.covers(
        "oneloop.tools.nodes",
        "oneloop.supervise.ranks",
        "oneloop.tools.elastic.agent",
        "oneloop.tools.elastic.rendezvous",
    ),
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.timeout(900),
]
KEYS = f"{lab.KEYS} --duration 100"
LIMIT = 30.0  # seconds in which all processes have ended or begun to restart


@pytest.fixture(scope="module", autouse=True)
def hosts():
    if why := lab.why_no_namespaces():
        pytest.skip(why)
    with lab.two_hosts():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    keys = f"{lab.written_task(folder)} {KEYS} --batch.grain 16".replace("--batch.micro 16", "")
    assert lab.Node(f"--config_file single {keys} --run.dir run".split(), folder).ended(120) == 0
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the final weights by name."""
    return {
        name: value.numpy().tobytes()
        for name, value in load_file(folder / "final/model.safetensors").items()
    }


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("case", lab.CASES)
def test_a_fault_with_grain(case, repeat, tmp_path, undisturbed):
    keys = f"{lab.written_task(tmp_path)} {KEYS} --batch.grain 16".replace("--batch.micro 16", "")
    outcome = lab.fault(case, tmp_path, keys, port=29400 + repeat)
    assert outcome.reported < LIMIT and outcome.ended < LIMIT, outcome
    if case == "store killed":  # the others report it; the same command resumes
        assert outcome.codes == [-9, 1] and "node" in outcome.output, outcome.output
        assert (
            lab.Node(f"--config_file single {keys} --run.dir run".split(), tmp_path).ended(120) == 0
        )
    else:
        assert outcome.codes[0] == 0, outcome.output
    assert weights(tmp_path / "run") == weights(undisturbed / "run")


@pytest.mark.parametrize("case", ["link cut", "host added", "rank killed"])
def test_a_fault_without_grain_equals_a_run_resumed_by_hand(case, tmp_path):
    """By hand: the same run until the checkpoint, continued on as many processes as after the
    fault."""
    keys = f"{lab.written_task(tmp_path)} {KEYS}"
    outcome = lab.fault(case, tmp_path, keys)
    assert outcome.codes[0] == 0, outcome.output
    by_hand, checkpoint = tmp_path / "by-hand", f"step-{outcome.resumed:08}"
    shutil.copytree(
        tmp_path / "run",
        by_hand,
        ignore=lambda _, names: {"final", "summary.json", "report.html"} & {*names},
    )
    assert (by_hand / "checkpoints" / checkpoint).is_dir()
    for folder in (by_hand / "checkpoints").iterdir():
        if folder.name > checkpoint:
            shutil.rmtree(folder)
    config = "--config_file single" if case == "link cut" else "--config_file ddp --num_processes 2"
    assert lab.Node(f"{config} {keys} --run.dir by-hand".split(), tmp_path).ended(120) == 0
    assert weights(by_hand) == weights(tmp_path / "run")


def test_too_few_nodes_wait_and_then_end(tmp_path):
    """Two nodes are needed, and the link is cut: the one with the rendezvous waits for the other,
    which ends."""
    keys = f"--config_file ddp {lab.written_task(tmp_path)} {KEYS} --run.dir run"
    words = f"--nodes 2 --rendezvous 10.77.0.1:29411 --max_restarts 3 --rejoin 20s {keys}".split()
    nodes = [lab.Node(words, tmp_path, space=space) for space in (1, 2)]
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000020")
    lab.link("down")
    began = time.monotonic()
    try:
        assert nodes[1].ended(LIMIT) == 1 and time.monotonic() - began < LIMIT
        assert (
            lab.when(nodes[:1], "waiting for nodes to join: at least 2", since=began) - began
            < LIMIT
        )
        assert (
            nodes[0].ended(LIMIT + 20) == 1
            and "fewer than 2 nodes joined in 20 s" in nodes[0].output
        )
    finally:
        lab.link("up")
    assert "node " in (tmp_path / "run" / "summary.json").read_text()


def test_a_node_that_stands_by_continues_the_run_of_a_lost_one(tmp_path):
    """One micro-batch per step: only host 1 trains; host 2 holds the rendezvous."""
    keys = f"--config_file ddp {lab.written_task(tmp_path)} {KEYS} --run.dir run".replace(
        "--batch.micro 16", "--batch.micro 64"
    )
    words = f"--nodes 1:2 --rendezvous 10.77.0.2:29412 --max_restarts 3 {keys}".split()
    nodes = [lab.Node(words, tmp_path, space=space) for space in (1, 2)]
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000020")
    assert nodes[0].trainers() and not nodes[1].running("-m oneloop.train")
    nodes[0].kill()
    began = time.monotonic()
    assert lab.when(nodes[1:], "resuming from", since=began) - began < 2 * LIMIT
    assert nodes[1].ended(120) == 0
