"""The agent of one node: it starts the node's training processes, and starts them again after a
failure.

``oneloop launch`` runs it if there are several nodes, or restarts. It is torch's elastic agent,
with oneloop's exit codes: only an error (1) leads to a restart, and each attempt has a separate
exit-code file. Ranks over which the batch does not divide evenly are spares: no process is started
for them.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED, BadInput
from oneloop.basics.launcher import FILE, HOST, on_stops, register_process
from oneloop.launch.before_imports import read_once
from oneloop.launch.command import accelerate_variables
from oneloop.launch.node_checks import compared, facts, foreign_folder
from oneloop.launch.nodes import Nodes, address_towards, is_here
from oneloop.recipe.schema import Recipe
from oneloop.supervise.supervisor import say

_BEAT, _BEATS = 2, 3  # seconds between two signs of life of a node, and how many may be missing
_LAST_CALL = 3.0  # seconds in which more nodes may join once there are enough
_LOST = 10.0  # seconds without an answer after which the node of the rendezvous counts as lost
_END = 5.0  # seconds in which all nodes should end a run
_SAVE = 600  # seconds for a last checkpoint before a node joins


def usable_ranks(ranks: int, recipe: Recipe) -> int:
    """Return how many ranks can train: the largest number, up to ``ranks``, that divides batch.size
    / micro-batch."""
    batch = recipe.batch
    micro = batch.grain or (batch.micro if isinstance(batch.micro, int) else 1)
    return max(
        number for number in range(1, ranks + 1) if number == 1 or batch.size // micro % number == 0
    )


class Agent(LocalElasticAgent):
    """torch's agent, for a training command with oneloop's exit codes."""

    def __init__(
        self, spec: WorkerSpec, nodes: Nodes, folder: Path, recipe: Recipe | None, store: Store
    ) -> None:
        super().__init__(
            spec, DefaultLogsSpecs(), exit_barrier_timeout=_END, shutdown_timeout=_SAVE
        )
        self._nodes, self.folder, self._recipe, self._everything = nodes, folder, recipe, store
        self._name = os.environ[HOST]
        self._failed_at: float | None = None  # when another node reported a failure
        self._last_beat = "", 0.0  # of rank 0's node, and when it changed
        self.code, self.ended, self._attempt, self._stop_requested = ERROR, False, 0, False

    def stop(self, number: int, frame: object) -> None:
        """Handle a stop signal, which the training processes get too; without any, end at once."""
        self._stop_requested = True
        if self._pcontext is None or not self._worker_group.workers:
            say(f"stopped by {signal.Signals(number).name}; no process trains on this node")
            os._exit(STOPPED)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._worker_group.workers = []
        with _announced(
            f"waiting for nodes to join: at least {self._nodes.least} within "
            f"{self._nodes.rejoin:.0f} s"
        ):
            super()._rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> Any:
        address = address_towards(self._nodes.host, self._nodes.port)
        folder = (
            self._recipe.folder
            if self._recipe is not None and self._recipe.mirror is None
            else None
        )
        mine = facts(self._name, address, spec.local_world_size, folder, first=group_rank == 0)
        every = exchanged(store, "facts", mine, group_rank, group_world_size)
        seen = exchanged(
            store, "seen", foreign_folder(self._name, every[0]), group_rank, group_world_size
        )
        if group_rank == 0 and "file" in mine:
            Path(mine["file"]).unlink(missing_ok=True)
        if wrong := next(compared(every), "") or next(filter(None, seen), ""):
            raise BadInput(wrong)
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        ranks = workers[0].world_size
        used = ranks if self._recipe is None else usable_ranks(ranks, self._recipe)
        if group_rank == 0 and used < ranks:
            say(
                f"{used} of {ranks} ranks train, the others stand by: the micro-batches do not "
                "divide evenly over more"
            )
        for worker in workers:
            worker.world_size = worker.role_world_size = used
        return [worker for worker in workers if worker.global_rank < used]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt, self._failed_at, self._last_beat = (
            self._attempt + 1,
            None,
            ("", time.monotonic()),
        )
        os.environ[FILE] = str(self.folder / f"exit_code-{self._attempt}")
        return super()._start_workers(worker_group) if worker_group.workers else {}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        joins = worker_group.state is WorkerState.HEALTHY
        if joins and worker_group.group_rank == 0:
            say("a node joins: saving, and starting again with it")
        self._shutdown(signal.SIGTERM if joins else signal.SIGKILL, timeout=_SAVE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        store = self._store
        assert store is not None
        if self._stop_requested:
            store.set("stop", "1")
        result = (
            super()._monitor_workers(worker_group)
            if worker_group.workers
            else RunResult(WorkerState.HEALTHY)
        )
        if (
            result.state is WorkerState.HEALTHY
            and not worker_group.workers
            and store.check(["ended"])
        ):
            result = RunResult(WorkerState.SUCCEEDED)
            self.code = int(store.get("ended"))
        elif result.state is WorkerState.SUCCEEDED:
            file = Path(os.environ[FILE])
            self.code = int(file.read_text()) if file.exists() else 0
        if result.state is WorkerState.HEALTHY and not self._failed_elsewhere(store):
            return result
        joins = self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0 and not store.check(
            ["stop"]
        )
        if result.state is WorkerState.SUCCEEDED and self.code == STOPPED and joins:
            return RunResult(WorkerState.HEALTHY)  # stopped only for a node that joins
        if result.state is WorkerState.SUCCEEDED and self.code != ERROR:
            store.set("ended", str(self.code))
            return result
        self._count_failure(store)
        return RunResult(WorkerState.FAILED)

    def _failed_elsewhere(self, store: Store) -> bool:
        """Return whether another node has failed; the processes of this one have some seconds to
        report it, and end."""
        now, group = time.monotonic(), self._worker_group
        if group.group_rank == 0:
            store.set("beat", str(int(now)))
        elif not group.workers and (beat := store.get("beat").decode()) != self._last_beat[0]:
            self._last_beat = beat, now
        if store.check(["failed"]):
            self._failed_at = self._failed_at or now
        lost = group.group_rank != 0 and not group.workers and now - self._last_beat[1] > _LOST
        return lost or (self._failed_at is not None and now - self._failed_at > _END)

    def _count_failure(self, store: Store) -> None:
        """Count one failure of the whole run, whichever nodes notice it, and what remains of its
        restarts."""
        if store.add("failed", 1) == 1:
            self._everything.add("failures", 1)
            store.set("counted", "1")
        store.wait(["counted"], timedelta(seconds=_END))
        self.code = ERROR
        left = (
            -1
            if store.check(["stop"])
            else self._nodes.restarts - self._everything.add("failures", 0)
        )
        self._remaining_restarts = max(0, left + 1)
        if self._nodes.restarts:
            if left >= 0:
                say(f"{self._name}: restarting; {left} restarts are left")
            else:
                say(f"{self._name}: no restarts are left")


def exchanged(
    store: Store, name: str, mine: Any, rank: int, ranks: int, seconds: float = 30.0
) -> list[Any]:
    """Return the values of all nodes, in order; a signal can interrupt it. Raise ConnectionError if
    one is missing."""
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys, until = [f"{name}/{other}" for other in range(ranks)], time.monotonic() + seconds
    while not store.check(keys):
        time.sleep(0.05)
        if time.monotonic() > until:
            raise ConnectionError(
                f"another node did not answer in {seconds:.0f} s; see the output of all nodes"
            )
    return [json.loads(store.get(key)) for key in keys]


@contextmanager
def _announced(words: str, after: float = 3.0) -> Iterator[None]:
    """Print the words if the block takes longer than ``after`` seconds."""
    timer = threading.Timer(after, say, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(nodes: Nodes) -> tuple[TCPStore, bool]:
    """Return the store of the rendezvous, and whether this process holds it: the first one on its
    node does. Raise ConnectionError if it does not answer."""
    timeout = timedelta(seconds=30)
    if is_here(nodes.host):
        with suppress(RuntimeError):  # another agent on this host has opened it
            return TCPStore(
                nodes.host, nodes.port, is_master=True, multi_tenant=True, timeout=timeout
            ), True
    until = time.monotonic() + nodes.rejoin
    with _announced(
        f"waiting for the rendezvous at {nodes.host}:{nodes.port}, for up to {nodes.rejoin:.0f} s"
    ):
        while not _answers(nodes):
            if time.monotonic() > until:
                advice = (
                    f"start the same command on {nodes.host}, or check the address and the firewall"
                )
                raise ConnectionError(
                    f"no answer from {nodes.host}:{nodes.port} in {nodes.rejoin:.0f} s; {advice}"
                )
            time.sleep(0.5)
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(DistError):
            found.append(TCPStore(nodes.host, nodes.port, is_master=False, timeout=timeout))

    # it never returns if another program listens there
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_LOST)
    if not found:
        raise ConnectionError(
            f"another program uses {nodes.host}:{nodes.port}; choose another free port"
        )
    return found[0], False


def _lost(nodes: Nodes) -> str:
    lost = (
        f"the rendezvous at {nodes.host}:{nodes.port} does not answer: that node, or the link to "
        "it, is lost"
    )
    return f"{lost}; start the same command again"


def _answers(nodes: Nodes) -> bool:
    try:
        with socket.create_connection((nodes.host, nodes.port), timeout=_BEAT):
            return True
    except OSError:
        return False


def _end_without_rendezvous(agent: Agent, nodes: Nodes) -> None:
    """End this node if the node of the rendezvous does not answer any more."""
    last = time.monotonic()
    while time.monotonic() - last < _LOST:
        time.sleep(_BEAT)
        last = time.monotonic() if _answers(nodes) else last
    if not agent.ended:
        say(_lost(nodes))
        agent._shutdown(signal.SIGKILL, timeout=2)
        _exit(agent.folder, ERROR)


def run(nodes: Nodes, words: Sequence[str], module: str, folder: Path) -> int:
    """Train on this node until the run ends; return oneloop's exit code. Raise BadInput."""
    variables, training, processes = accelerate_variables(words, nodes)
    os.environ |= variables | {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from oneloop.launch.processes import reject_strategy

    reject_strategy(
        sharding=os.environ.get("ACCELERATE_USE_FSDP") == "true", elastic=nodes.least < nodes.most
    )
    recipe = read_once(tuple(training)) if module == "oneloop.train" else None
    say(f"{nodes}; processes on this node: {processes}")
    store, holds = open_store(nodes)
    mine = f"--nodes {nodes.least}:{nodes.most} {' '.join(training)}"
    if (other := store.compare_set("command", "", mine).decode()) != mine:
        raise BadInput(
            f"start the same command on all nodes: another was started with {other!r}, this "
            f"with {mine!r}"
        )
    address = address_towards(nodes.host, nodes.port)
    os.environ[HOST] = f"{socket.gethostname()} ({address})"
    timeout = RendezvousTimeout(
        timedelta(seconds=nodes.rejoin), timedelta(seconds=_LAST_CALL), timedelta(seconds=_END)
    )
    backend = C10dRendezvousBackend(store, "oneloop")
    some: Any = (
        "oneloop",
        store,
        backend,
        nodes.least,
        nodes.most,
        address,
        timeout,
        _BEAT,
        _BEATS,
    )
    handler = DynamicRendezvousHandler.from_backend(*some)
    how: dict[str, Any] = {
        "max_restarts": nodes.restarts,
        "monitor_interval": 0.2,
        "entrypoint": sys.executable,
    }
    spec = WorkerSpec("oneloop", processes, handler, args=("-m", module, *training), **how)
    agent = Agent(spec, nodes, folder, recipe, store)
    on_stops(agent.stop)
    if not holds:
        threading.Thread(target=_end_without_rendezvous, args=(agent, nodes), daemon=True).start()
    try:
        agent.run()
        store.set("final", str(agent.code))
    except RendezvousTimeoutError:
        say(
            f"fewer than {nodes.least} nodes joined in {nodes.rejoin:.0f} s; start the same "
            "command on more nodes"
        )
    except RendezvousClosedError:
        agent.code = int(store.get("final")) if store.check(["final"]) else ERROR
        say("the run has ended on the other nodes")
    except (RendezvousError, DistError):
        say(_lost(nodes))
    finally:
        agent.ended = True
        with suppress(RendezvousError, DistError):
            handler.shutdown()
    return agent.code


def main() -> NoReturn:
    """Run the agent that ``oneloop launch`` describes in the first argument, and exit with
    oneloop's exit code."""
    logging.disable(logging.ERROR)  # the messages of torch's agent name no remedy
    given = json.loads(sys.argv[1])
    folder = Path(given.pop("folder"))
    register_process()
    on_stops(lambda number, _: os._exit(STOPPED))
    try:
        code = run(Nodes(**given.pop("nodes")), folder=folder, **given)
    except (BadInput, OSError) as error:
        say(str(error))
        code = BAD_INPUT if isinstance(error, BadInput) else ERROR
    _exit(folder, code)


def _exit(folder: Path, code: int) -> NoReturn:
    (folder / "exit_code").write_text(str(code))
    os._exit(code)  # without destructors: the store of another node may be gone


if __name__ == "__main__":
    main()
