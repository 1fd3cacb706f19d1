"""Runs over several nodes: what the launcher reads from options and environment, restarts, spares
and messages."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

import lab
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.launcher import HOST
from oneloop.cli import main
from oneloop.launch.command import NODE_OPTIONS, launch_options, split
from oneloop.recipe.parse import recipe
from oneloop.tools.elastic import bounded_store, rendezvous
from oneloop.tools.elastic.agent import Agent, usable_ranks
from oneloop.tools.elastic.bounded_store import BoundedStore
from oneloop.tools.elastic.clocks import clock_problem, show_clock
from oneloop.tools.elastic.node_checks import NodeFacts, compared, foreign_folder
from oneloop.tools.elastic.signed_backend import agree_on_secret, secret
from oneloop.tools.nodes import ACCELERATE, Nodes, nodes, nodes_of_accelerate
from worlds import ROOT, free_port, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.launcher",
    "oneloop.launch.command",
    "oneloop.launch.processes",
    "oneloop.run.entry",
    "oneloop.supervise.ranks",
    "oneloop.tools.elastic.agent",
    "oneloop.tools.elastic.bounded_store",
    "oneloop.tools.elastic.clocks",
    "oneloop.tools.elastic.elastic",
    "oneloop.tools.elastic.node_checks",
    "oneloop.tools.nodes",
    "oneloop.tools.elastic.rendezvous",
    "oneloop.tools.elastic.signed_backend",
)

SLURM = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-09],gpu1",
}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_JOB_ID": "4711", "SLURM_GPUS_ON_NODE": "8"}
KUBEFLOW = {
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-0",
    "PET_MASTER_PORT": "29500",
}
FOUND = [
    ("", {}, None),
    ("", SLURM, (4, 4, "node07", 24711, 8)),
    ("", KUBEFLOW, (2, 4, "job-0", 29500, 8)),
    ("--nodes 2:8 --rendezvous a:1", {}, (2, 8, "a", 1, None)),
    ("--nodes 2 --rendezvous=a --processes_per_node 3", {}, (2, 2, "a", 29400, 3)),
    ("--nodes 2:3", KUBEFLOW, (2, 3, "job-0", 29500, 8)),  # options override the environment
    ("--max_restarts 3", {}, (1, 1, "127.0.0.1", 0, None)),
    ("--max_restarts 3", KUBEFLOW, (2, 4, "job-0", 29500, 8)),
    ("", SLURM | {"SLURM_STEP_ID": str((1 << 32) - 6)}, None),  # the shell of salloc
    (
        "",
        {"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"},
        None,
    ),  # a batch script
    ("", {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, None),
]
REJECTED = [
    ("--nodes 8:2 --rendezvous a:1", {}, "the minimum 8 is above the maximum 2; write 2:8"),
    ("--nodes 2", {}, "--nodes 2 needs the address of one node"),
    ("--nodes many --rendezvous a", {}, "--nodes many must be a number of nodes"),
    ("--nodes 2 --rendezvous a:b", {}, "--rendezvous a:b must be the address of one node"),
    ("--nodes 2 --rendezvous a --rejoin soon", {}, "--rejoin 'soon' is not a time"),
    ("--nodes 2 --rendezvous a --max_restarts few", {}, "--max_restarts must be a whole number"),
    (
        "",
        SLURM | KUBEFLOW,
        (
            "two sources disagree: 2 to 4 nodes, 8 processes each, rendezvous at job-0:29500 (from "
            "PET_"
        ),
    ),
    ("", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "add --ntasks-per-node=1"),
]


@pytest.mark.parametrize(("typed", "environ", "expected"), FOUND)
def test_the_nodes_are_read_from_options_or_one_environment(typed, environ, expected):
    words = [*typed.split(), "--config_file", "ddp", "digits", "--seed", "1"]
    given, rest = split(words, NODE_OPTIONS)
    assert rest == ["--config_file", "ddp", "digits", "--seed", "1"]
    found = nodes(given, environ)
    assert (
        found and (found.least, found.most, found.host, found.port, found.processes)
    ) == expected


@pytest.mark.parametrize(("typed", "environ", "message"), REJECTED)
def test_options_that_cannot_be_followed(typed, environ, message):
    with pytest.raises(BadInput) as rejected:
        nodes(split([*typed.split(), "digits"], NODE_OPTIONS)[0], environ)
    assert message in str(rejected.value)


def test_accelerates_own_options_for_several_machines():
    file = str(ROOT / "accelerate_configs" / "multi_node.yaml")
    words = ["--config_file", file, "--main_process_ip", "10.0.0.1", "--machine_rank", "1", "gpt"]
    expected = Nodes(2, 2, "10.0.0.1", 29500, 8, source=ACCELERATE)
    assert nodes_of_accelerate(launch_options(words)[2]) == expected


def test_accelerate_makes_the_variables_of_a_config_file():
    """The function that completes the options is private in accelerate: this test shows if it
    changes."""
    args = launch_command_parser().parse_args(
        ["--config_file", str(ROOT / "accelerate_configs/fsdp2.yaml"), "-m", "x"]
    )
    made = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    assert made["ACCELERATE_USE_FSDP"] == "true" and made["FSDP_VERSION"] == "2"


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"size": 64, "grain": 16}, [1, 2, 2, 4, 4, 4, 4]),
        ({"size": 48, "micro": 4}, [1, 2, 3, 4, 4, 6, 6]),
        ({"size": 10}, [1, 2, 2, 2, 5, 5, 5]),
        ({"size": 64, "micro": "auto"}, [1, 2, 2, 4, 4, 4, 4]),
    ],
)
def test_ranks_that_the_batch_can_use(batch, expected):
    made = recipe("digits", batch=batch)
    assert [usable_ranks(ranks, made) for ranks in range(1, 8)] == expected


def _first(*every: NodeFacts) -> str:
    return next(compared(every), "")


def test_facts_of_a_node_with_another_version_are_read():
    sent = {"name": "a", "processes": 8, "settings": {"oneloop": "9"}, "loopback": ""}
    assert foreign_folder("b", sent) == ""  # it has sent no file, as without a shared folder
    newer = sent | {"settings": {"oneloop": "10"}, "newer": 1}
    assert "oneloop is 9 on a and 10 on a" in _first(sent, newer)


def test_nodes_that_do_not_fit_together():
    one = NodeFacts(
        name="a",
        processes=8,
        settings={"torch": "2.15"},
        loopback="",
        file="",
    )
    two = one | {"name": "b"}
    assert _first(one, two) == ""
    fewer = two | {"processes": 4}
    assert "a 8, b 4; give the smallest as --processes_per_node" in _first(one, fewer)
    older = two | {"settings": {"torch": "2.14"}}
    assert "torch is 2.15 on a and 2.14 on b" in _first(one, older)
    half = two | {"settings": {"torch": "2.15", "ACCELERATE_MIXED_PRECISION": "bf16"}}
    assert "ACCELERATE_MIXED_PRECISION is none on a and bf16 on b; use the same" in _first(
        one, half
    )
    unreachable = one | {"loopback": "resolves to 127.0.1.1"}
    assert _first(unreachable) == ""  # only one node
    assert "127" in _first(one, unreachable)


def _launch(words: list[str]) -> None:
    """Run ``oneloop launch`` with these words, without the seconds of its imports."""
    sys.exit(main(["launch", *words]))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "--nodes 2 --rendezvous 127.0.0.1 --rejoin 1s --config_file ddp",
            1,
            "fewer than 2 nodes joined in 1 s",
        ),
        pytest.param(
            "--max_restarts 1 --config_file OLD",
            2,
            "fsdp_version 1 is not supported",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_start_that_fails(words, code, message, tmp_path):
    old = (
        (ROOT / "accelerate_configs" / "fsdp2.yaml")
        .read_text()
        .replace("fsdp_version: 2", "fsdp_version: 1")
    )
    (tmp_path / "old.yaml").write_text(old)
    typed = [*words.replace("OLD", "old.yaml").split(), "digits"]
    world = run(_launch, typed, folder=tmp_path)
    assert world.codes == [code] and message in world.output, world.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old.yaml"]  # nothing was written


def test_a_rendezvous_that_nobody_answers():
    with pytest.raises(
        ConnectionError,
        match=r"no answer from 192.0.2.1:29400 in 0 s; start the same command on 192.0.2.1",
    ):
        rendezvous.open_store(Nodes(2, 2, "192.0.2.1", rejoin=0.1))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    for node in lab.NODES:
        node.kill()
    lab.NODES.clear()


def _weights(folder: Path) -> dict[str, bytes]:
    return {
        name: value.numpy().tobytes()
        for name, value in load_file(folder / "final" / "model.safetensors").items()
    }


def _started(
    number: int,
    keys: str,
    folder: Path,
    *,
    port: int,
    least: int = 1,
    most: int = 2,
    config: str = "ddp",
    variables: dict[str, str] | None = None,
) -> list[lab.Node]:
    words = (
        f"--nodes {least}:{most} --rendezvous 127.0.0.1:{port} --max_restarts 5 --config_file "
        f"{config} {keys}"
    )
    return [lab.Node(words.split(), folder, variables=variables) for _ in range(number)]


def test_a_killed_rank_is_started_again_and_the_weights_are_bit_identical(tmp_path):
    port = free_port()
    task = lab.written_task(tmp_path, 0.02)
    keys = f"{task} {lab.KEYS} --batch.grain 16 --duration 40".replace("--batch.micro 16", "")
    run(train, [*keys.split(), "--run.dir", str(tmp_path / "whole")], folder=tmp_path).ok()
    first, second = _started(2, f"{keys} --run.dir run", tmp_path, port=port, least=2)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
    os.kill(second.trainers()[0], signal.SIGKILL)
    assert first.ended() == second.ended() == 0, first.output + second.output
    assert "was killed by SIGKILL" in first.output + second.output, first.output + second.output
    assert "a node joins" not in first.output + second.output
    assert "resuming from run/checkpoints/step-00000010" in first.output + second.output
    assert _weights(tmp_path / "run") == _weights(tmp_path / "whole")


def _killed_after(nodes: list[lab.Node], node: lab.Node, step: int, folder: Path) -> float:
    """Kill a node once the checkpoint of the step exists; return the time."""
    lab.until(folder / "run" / "checkpoints" / f"step-{step:08}")
    node.kill()
    nodes.remove(node)
    return time.monotonic()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("grain", [True, False])
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_4_ranks_then_3_then_2_then_4(grain, config, tmp_path):
    """12 micro-batches divide evenly over 4, 3 and 2 ranks; 16 micro-batches with batch.grain over
    4 and 2 only."""
    port = free_port()
    size = "--batch.size 64 --batch.grain 4" if grain else "--batch.size 48 --batch.micro 4"
    keys = f"{lab.written_task(tmp_path, 0.04)} {lab.KEYS} {size} --duration 250".replace(
        "--batch.size 64 --batch.micro 16", ""
    )
    if grain:
        (tmp_path / "fast").mkdir()
        lab.written_task(tmp_path / "fast", 0.0)
        run(
            train, [*keys.split(), "--run.dir", str(tmp_path / "whole")], folder=tmp_path / "fast"
        ).ok()
    started = _started(
        4, f"{keys} --run.dir run", tmp_path, port=port, least=2, most=4, config=config
    )
    nodes, ranks = list(started), "ranks x"
    lab.when(nodes, f"= 4 {ranks}")
    holds = next(node for node in nodes if _holds_rendezvous(node, port))
    others = [node for node in nodes if node is not holds]
    since = _killed_after(nodes, others[0], 20, tmp_path)
    lab.when(nodes, f"= {2 if grain else 3} {ranks}", since=since)
    if grain:
        lab.when(nodes, "2 of 3 ranks train, the others stand by", since=since)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000060")
    second = next(node for node in others[1:] if node.trainers())  # not the one that stands by
    since = _killed_after(nodes, second, 60, tmp_path)
    lab.when(nodes, f"= 2 {ranks}", since=since)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000100")
    since = time.monotonic()
    nodes += _started(
        2, f"{keys} --run.dir run", tmp_path, port=port, least=2, most=4, config=config
    )
    lab.when(nodes, f"= 4 {ranks}", since=since)
    assert [node.ended(120) for node in nodes] == [0] * 4, "\n\n".join(
        node.output for node in nodes
    )
    if grain:
        assert _weights(tmp_path / "run") == _weights(tmp_path / "whole")


def _holds_rendezvous(node: lab.Node, port: int) -> bool:
    found = [
        one
        for one in psutil.Process(node.agent()).net_connections()
        if one.status == psutil.CONN_LISTEN
    ]
    return any(one.laddr.port == port for one in found)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_saves_by_time_change_no_weight(ranks, tmp_path):
    task = lab.written_task(tmp_path, 0.1)
    keys = (
        f"{task} --batch.size 64 --batch.micro 32 --duration 12 --save.keep 9 --track none "
        "--eval.every 0".split()
    )
    for every in ("0.5s", "0"):
        run(
            train,
            [*keys, "--save.every", every, "--run.dir", f"save-{every}"],
            ranks=ranks,
            folder=tmp_path,
        ).ok()
    lines = [
        json.loads(line)
        for line in (tmp_path / "save-0.5s" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line["step"] for line in lines if line.get("event") == "save"]
    seconds = json.loads((tmp_path / "save-0.5s" / "summary.json").read_text())["seconds"]
    assert steps == sorted(set(steps)) and steps[-1] == 12 and len(steps) >= 2, steps
    assert len(steps) <= seconds / 0.5 + 2, (steps, seconds)  # one per 0.5 s, and one at the end
    assert _weights(tmp_path / "save-0.5s") == _weights(tmp_path / "save-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        ("--optimizer.lr 1e30", 3, "diverged: "),
        ("--init.from nowhere", 2, "nowhere"),
        ("STOP", 75, "the same command continues the run"),
    ],
)
def test_ends_without_a_restart(more, code, text, tmp_path):
    port = free_port()
    keys = (
        f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 60 --run.dir run "
        f"{more.replace('STOP', '')}"
    )
    nodes = _started(2, keys, tmp_path, port=port, least=2)
    if more == "STOP":
        lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
        nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.ended(120) for node in nodes] == [code, code], "\n\n".join(
        node.output for node in nodes
    )
    output = "\n".join(node.output for node in nodes)
    assert text in output and "restarting" not in output, output


@pytest.mark.slow
def test_a_node_whose_ranks_all_stand_by_ends_with_the_run(tmp_path):
    """One micro-batch per step: one of two ranks trains."""
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 40 --run.dir run"
    nodes = _started(2, keys.replace("--batch.micro 16", "--batch.micro 64"), tmp_path, port=port)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000020")
    lab.when(nodes, "1 of 2 ranks train, the others stand by")
    assert [len(node.trainers()) for node in nodes] in ([0, 1], [1, 0])
    assert [node.ended(120) for node in nodes] == [0, 0]


@pytest.mark.slow
def test_nodes_with_different_commands(tmp_path):
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --run.dir run"
    first, second = (
        _started(1, f"{keys} --duration {steps}", tmp_path, port=port, least=2)[0]
        for steps in (20, 30)
    )
    lab.when([first, second], "start the same command on all nodes")
    late = first if "another was started" in first.output else second
    assert late.ended(120) == 2 and not (tmp_path / "run").exists()


gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="a clock is set off with gcc")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["saved", "requested"])
def test_a_saved_stop_is_a_stop_without_the_agent_of_the_rendezvous(when, tmp_path):
    """The agent that holds the rendezvous is killed once the stop is saved, or before."""
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --run.dir run"
    nodes = _started(2, keys, tmp_path, port=port, least=2)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
    holder = next(node for node in nodes if _holds_rendezvous(node, port))
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    if when == "saved":
        lab.until(tmp_path / "run" / "summary.json")
    else:
        time.sleep(0.3)
    os.kill(holder.agent(), signal.SIGKILL)
    assert [node.ended() for node in nodes] == [75, 75], nodes[0].output + nodes[1].output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 75


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0, ""),
        (60, "the clock of second is 60 s behind that of first, and 2 s are allowed; set both"),
        (-60, "the clock of second is 60 s ahead of that of first, and 2 s are allowed; set both"),
    ],
)
def test_a_clock_that_is_off_is_named(seconds, message):
    """``seconds``: by which the clock of the node of the rendezvous is ahead."""
    store, ended = HashStore(), threading.Event()

    def show() -> None:
        while not ended.wait(0.01):
            store.set("clock", json.dumps(["first", time.time() + seconds]))

    showing = threading.Thread(target=show, daemon=True)
    if seconds:
        showing.start()
    else:
        show_clock(store, "first")
    found = clock_problem(store, "second")
    ended.set()
    assert found.startswith(message)
    assert bool(found) == bool(message)


@gcc
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-60, 60])
def test_a_clock_that_is_off_ends_all_nodes_before_the_run(seconds, tmp_path):
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --run.dir run"
    first = _started(1, keys, tmp_path, port=port, least=2)[0]
    off = lab.clock_off(tmp_path, seconds)
    second = _started(1, keys, tmp_path, port=port, least=2, variables=off)[0]
    assert [first.ended(120), second.ended(120)] == [2, 2], first.output + second.output
    for node in (first, second):  # either may hold the rendezvous, with whose clock it compares
        assert re.search("60 s (ahead of|behind) that of ", node.output), node.output
        assert node.output.count("(127.0.0.1)") == 2 and "Traceback" not in node.output
    assert not (tmp_path / "run").exists()


@gcc
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-60, 60])
def test_a_running_run_goes_on_without_a_node_whose_clock_is_off(seconds, tmp_path):
    """A node that comes later is rejected. A clock that changes in the middle is no failure."""
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 200 --run.dir run"
    off = lab.clock_off(tmp_path, 0)
    first = _started(1, keys, tmp_path, port=port, least=2)[0]
    lab.when([first], "trusts its network")  # it holds the rendezvous
    changed = _started(1, keys, tmp_path, port=port, variables=off, least=2)[0]
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
    (tmp_path / "clock").write_text(str(seconds))
    late = _started(1, keys, tmp_path, port=port, variables=off, least=2)[0]
    assert late.ended(120) == 2 and "60 s" in late.output, late.output
    assert [first.ended(120), changed.ended(120)] == [0, 0], first.output + changed.output
    assert "joins" not in first.output + changed.output


def test_a_rendezvous_below_the_minimum_is_an_error(tmp_path, monkeypatch):
    """torch's rendezvous drops a node whose clock is behind, and then starts with fewer."""
    monkeypatch.setenv(HOST, "here")
    nodes = Nodes(2, 2, "127.0.0.1", 0)
    store, holds = rendezvous.open_store(nodes)
    handler = rendezvous.rendezvous_handler(nodes, store, "127.0.0.1", None)
    spec = WorkerSpec("oneloop", 1, handler, entrypoint="python")
    agent = Agent(spec, nodes, tmp_path, None, store, holds=holds)
    with pytest.raises(ConnectionError, match="counts 1 nodes instead of 2 or more"):
        agent._assign_worker_ranks(store, 0, 1, spec)


HOLDS = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
time.sleep(600)
"""


def test_no_call_of_a_store_waits_for_a_stopped_process(monkeypatch):
    monkeypatch.setattr(bounded_store, "LOST", 1.0)
    words = [sys.executable, "-c", HOLDS]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        store = BoundedStore(TCPStore("127.0.0.1", int(holder.stdout.readline())))
        wrapped = PrefixStore("a", store)
        wrapped.set("key", "1")
        assert wrapped.add("number", 2) == 2 and wrapped.check(["key"])
        assert wrapped.compare_set("key", "1", "3") == wrapped.get("key") == b"3"
        with pytest.raises(DistStoreError, match="a/other missing for 1 s"):
            wrapped.wait(["other"], timedelta(seconds=1))
        assert not store.lost

        # Until all its threads have stopped, the holder may still answer.
        holder.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{holder.pid}/task")
        lab.until_true(
            lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir())
        )
        began = time.monotonic()
        with pytest.raises(DistStoreError, match="no answer in 1 s"):
            wrapped.check(["key"])
        for call in (wrapped.get, wrapped.wait, wrapped.add):
            with pytest.raises(DistStoreError, match="did not answer before"):
                call(*{wrapped.wait: (["key"],), wrapped.add: ("number", 1)}.get(call, ("key",)))
        assert time.monotonic() - began < 60 and store.lost
        with pytest.raises(ConnectionError, match="no rendezvous answers there"):
            rendezvous.open_store(Nodes(2, 2, "127.0.0.1", wrapped.underlying_store._store.port))
    finally:
        holder.kill()
        holder.wait()


def test_the_store_listens_on_the_interface_of_its_address():
    store, holds = rendezvous.open_store(Nodes(2, 2, "127.0.0.1", 0))
    found = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert holds and [one.ip for one in found if one.port == store._store.port] == ["127.0.0.1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["--max_restarts 1 --processes_per_node 2", "--num_processes 2"]
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_stopped_supervisor_does_not_hold_a_run_that_has_ended(launcher, rank, tmp_path):
    """On one host. The agent starts the processes, or accelerate's launcher."""
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 60 --run.dir run"
    node = lab.Node(f"{launcher} --config_file ddp {keys}".split(), tmp_path)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
    of_rank = [
        process
        for process in psutil.Process(node.process.pid).children(recursive=True)
        if process.environ().get("RANK") == rank and "oneloop.train" in process.cmdline()
    ]
    supervisor = next(one for one in of_rank if one.parent() not in of_rank)
    supervisor.suspend()
    assert node.ended(120) == 0, node.output
    assert "done; results in run" in node.output and "Traceback" not in node.output


@pytest.mark.slow
def test_no_node_joins_after_the_supervisor_of_rank_0_was_stopped(tmp_path):
    """The other node counts rank 0 as lost, and waits for its node to start again with it."""
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 250 --run.dir run"
    nodes = _started(2, keys, tmp_path, port=port, least=2)
    lab.until(tmp_path / "run" / "checkpoints" / "step-00000010")
    supervisor_of_rank_0 = next(
        pid
        for node in nodes
        for pid in set(node.running("-m oneloop.train")) - set(node.trainers())
        if psutil.Process(pid).environ()["RANK"] == "0"
    )
    os.kill(supervisor_of_rank_0, signal.SIGSTOP)
    assert [node.ended(120) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    output = nodes[0].output + nodes[1].output
    assert "rank 0 does not answer" in output and "a node joins" not in output, output


class Harmful:
    """A pickle that writes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


KEY = b"0123456789abcdef"
STATE = "torch.rendezvous.oneloop"  # torch's key of the state


@pytest.mark.parametrize("key", [None, KEY])
def test_a_stranger_s_pickle_is_read_only_without_a_secret(key, tmp_path):
    store, _ = rendezvous.open_store(Nodes(2, 2, "127.0.0.1", 0))
    nodes = Nodes(1, 1, "127.0.0.1", store._store.port)
    handler = rendezvous.rendezvous_handler(nodes, store, "127.0.0.1", key)
    assert handler.next_rendezvous().world_size == 1
    handler._stop_heartbeats()  # its thread would read the state, too
    stranger = TCPStore("127.0.0.1", nodes.port)
    stranger.set(STATE, b64encode(pickle.dumps(Harmful(tmp_path / "read"))))
    time.sleep(1.1)  # the handler keeps the last state for a second
    with pytest.raises(RendezvousStateError if key else AttributeError) as found:
        handler.num_nodes_waiting()
    assert not key or "has a wrong signature, and was not read" in str(found.value)
    assert (tmp_path / "read").exists() == (key is None)


def test_nodes_agree_on_the_secret(tmp_path):
    (tmp_path / "file").write_text(KEY.decode() + "\n")
    (tmp_path / "short").write_text("0123")
    assert secret({}) is None
    assert secret({"ONELOOP_SECRET": KEY.decode()}) == KEY
    assert secret({"ONELOOP_SECRET_FILE": str(tmp_path / "file")}) == KEY
    with pytest.raises(BadInput, match="at least 16 characters, got 4"):
        secret({"ONELOOP_SECRET_FILE": str(tmp_path / "short")})
    with pytest.raises(BadInput, match="ONELOOP_SECRET_FILE names cannot be read"):
        secret({"ONELOOP_SECRET_FILE": str(tmp_path / "none")})

    for first, other, message in [
        (KEY, KEY, ""),
        (None, None, ""),
        (KEY, b"x" * 16, "differs between nodes"),
        (None, KEY, "is set on some nodes only"),
        (KEY, None, "is set on some nodes only"),
    ]:
        store, _ = rendezvous.open_store(Nodes(2, 2, "127.0.0.1", 0))
        agree_on_secret(store, first)
        with pytest.raises(BadInput, match=message) if message else nullcontext():
            agree_on_secret(store, other)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["same", "another", "none"])
def test_nodes_with_a_secret(other, tmp_path):
    """One node has the secret in a variable, the other in a file."""
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 20 --run.dir run"
    value = KEY.decode()
    (tmp_path / "secret").write_text(value if other == "same" else f"{value} another")
    both = [{"ONELOOP_SECRET": value}, {"ONELOOP_SECRET_FILE": str(tmp_path / "secret")}]
    if other == "none":
        both[1] = {}
    nodes = [
        _started(1, keys, tmp_path, port=port, least=2, variables=variables)[0]
        for variables in both
    ]
    if other == "same":
        assert [node.ended(120) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
        assert "trusts its network" not in nodes[0].output + nodes[1].output
        return
    lab.until_true(lambda: any(node.process.poll() is not None for node in nodes))
    (late,) = [node for node in nodes if node.process.poll() is not None]
    assert late.ended() == 2 and "set the same one on all nodes" in late.output, late.output


@pytest.mark.slow
def test_a_waiting_node_ends_if_a_stranger_writes_to_its_rendezvous(tmp_path):
    port = free_port()
    keys = f"{lab.written_task(tmp_path)} {lab.KEYS} --duration 20 --run.dir run"
    variables = {"ONELOOP_SECRET": KEY.decode()}
    (node,) = _started(1, keys, tmp_path, port=port, least=2, variables=variables)
    lab.when([node], "waiting for nodes to join")
    stranger = TCPStore("127.0.0.1", port)
    stranger.set(STATE, b64encode(pickle.dumps(Harmful(tmp_path / "read"))))
    assert node.ended(120) == 1 and "has a wrong signature" in node.output, node.output
    assert not (tmp_path / "read").exists() and "Traceback" not in node.output
