"""The agent of one node, which starts the node's training processes.

It starts them again after a failure. ``oneloop launch`` runs it if there are several nodes, or
restarts. It is torch's elastic agent, with oneloop's exit codes: only an error (1) leads to a
restart, and each attempt has a separate exit-code file. Ranks over which the batch does not divide
evenly are spares: no process is started for them.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
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

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED, BadInput
from oneloop.basics.launcher import FILE, HOST, on_stops, register_process
from oneloop.launch.before_imports import read_once
from oneloop.launch.command import AgentTask, accelerate_variables
from oneloop.launch.node_checks import NodeFacts, compared, facts, foreign_folder, new_file
from oneloop.launch.nodes import Nodes, address_towards
from oneloop.launch.rendezvous import (
    BEAT,
    END,
    LOST,
    announced,
    answers,
    exchanged,
    lost,
    open_store,
    rendezvous_handler,
)
from oneloop.recipe.schema import Recipe
from oneloop.supervise.supervisor import say

_SAVE = 600  # seconds for a last checkpoint before a node joins


def usable_ranks(ranks: int, recipe: Recipe) -> int:
    """Return how many ranks can train.

    It is the largest number, up to ``ranks``, that divides batch.size / micro-batch.
    """
    batch = recipe.batch
    if batch.grain:
        micro = batch.grain
    elif isinstance(batch.micro, int):
        micro = batch.micro
    else:
        micro = 1  # the processes find it when they start
    for number in range(ranks, 1, -1):
        if batch.size // micro % number == 0:
            return number
    return 1


class Agent(LocalElasticAgent):
    """torch's agent, for a training command with oneloop's exit codes.

    It overrides private methods of torch's agent, which calls them in this order: ``_rendezvous``,
    ``_assign_worker_ranks``, ``_start_workers``, ``_monitor_workers`` again and again,
    ``_stop_workers``.

    Args:
        spec: torch's description of the training processes.
        nodes: the nodes of the run.
        folder: the folder of exit codes.
        recipe: the recipe; None if the processes do not train.
        store: the store of the rendezvous, which all attempts share.
    """

    def __init__(
        self, spec: WorkerSpec, nodes: Nodes, folder: Path, recipe: Recipe | None, store: Store
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(), exit_barrier_timeout=END, shutdown_timeout=_SAVE)
        self._nodes = nodes
        self.folder = folder
        self._recipe = recipe
        self._everything = store
        self._name = os.environ[HOST]

        self._attempt = 0  # number of starts
        self._stop_requested = False
        self._failed_at: float | None = None  # when another node reported a failure
        self._last_beat = ""  # of rank 0's node
        self._last_beat_at = 0.0  # when it changed

        self.code = ERROR  # oneloop's exit code
        self.ended = False

    def stop(self, number: int, frame: object) -> None:
        """Handle a stop signal, which the training processes get too; without any, end at once."""
        self._stop_requested = True
        if self._pcontext is None or not self._worker_group.workers:
            say(f"stopped by {signal.Signals(number).name}; no process trains on this node")
            os._exit(STOPPED)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._worker_group.workers = []
        with announced(
            f"waiting for nodes to join: at least {self._nodes.least} within "
            f"{self._nodes.rejoin:.0f} s"
        ):
            super()._rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> Any:
        self._compare_nodes(store, group_rank, group_world_size, spec.local_world_size)

        # Start as many ranks as the batch divides over. The others are spares.
        workers = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        ranks = used = workers[0].world_size
        if self._recipe is not None:
            used = usable_ranks(ranks, self._recipe)
        if group_rank == 0 and used < ranks:
            say(
                f"{used} of {ranks} ranks train, the others stand by: the micro-batches do not "
                "divide evenly over more"
            )
        for worker in workers:
            worker.world_size = worker.role_world_size = used
        return [worker for worker in workers if worker.global_rank < used]

    def _compare_nodes(self, store: Store, rank: int, nodes: int, processes: int) -> None:
        """Raise BadInput if the nodes do not fit together. Collective: call on every node."""
        # Collect the facts of all nodes. With a mirror, they need not share the run folder.
        folder = None
        if self._recipe is not None and self._recipe.mirror is None:
            folder = self._recipe.folder
        address = address_towards(self._nodes.host, self._nodes.port)
        file = new_file(folder, first=rank == 0)
        try:
            mine = facts(self._name, address, processes, file)
            shared = exchanged(store, "facts", mine.as_json(), rank, nodes)
            every = [NodeFacts.received(one) for one in shared]

            # All nodes must see the file of the first one, which then deletes it.
            seen = exchanged(store, "seen", foreign_folder(self._name, every[0]), rank, nodes)
        finally:
            if file is not None:
                file.unlink(missing_ok=True)

        # All nodes find the same error, and stop.
        for wrong in (*compared(every), *seen):
            if wrong:
                raise BadInput(wrong)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Forget the attempt before.
        self._attempt += 1
        self._failed_at = None
        self._last_beat = ""
        self._last_beat_at = time.monotonic()
        os.environ[FILE] = str(self.folder / f"exit_code-{self._attempt}")
        if not worker_group.workers:  # all ranks of this node are spares
            return {}
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # torch's agent stops healthy workers only if a node joins: they save before they end.
        if worker_group.state is not WorkerState.HEALTHY:
            self._shutdown(signal.SIGKILL, timeout=_SAVE)
            return
        if worker_group.group_rank == 0:
            say("a node joins: saving, and starting again with it")
        self._shutdown(signal.SIGTERM, timeout=_SAVE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        store = self._store
        assert store is not None
        if self._stop_requested:
            store.set("stop", "1")

        # Look at the processes of this node. If there are none, the other nodes report the end.
        if worker_group.workers:
            result = super()._monitor_workers(worker_group)
            if result.state is WorkerState.SUCCEEDED:
                file = Path(os.environ[FILE])
                self.code = int(file.read_text()) if file.exists() else 0
        elif store.check(["ended"]):
            result = RunResult(WorkerState.SUCCEEDED)
            self.code = int(store.get("ended"))
        else:
            result = RunResult(WorkerState.HEALTHY)
        if result.state is WorkerState.HEALTHY and not self._failed_elsewhere(store):
            return result

        # If the processes stopped only for a node that joins, torch's agent must start them again,
        # and not end: they count as healthy.
        waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        joins = waiting and not store.check(["stop"])
        if result.state is WorkerState.SUCCEEDED and self.code == STOPPED and joins:
            return RunResult(WorkerState.HEALTHY)

        # The run has ended, or failed.
        if result.state is WorkerState.SUCCEEDED and self.code != ERROR:
            store.set("ended", str(self.code))
            return result
        self._count_failure(store)
        return RunResult(WorkerState.FAILED)

    def _failed_elsewhere(self, store: Store) -> bool:
        """Return whether another node has failed.

        The processes of this node have some seconds to report it, and end.
        """
        now = time.monotonic()
        group = self._worker_group

        # Rank 0's node gives signs of life, which a node without processes watches.
        watches = group.group_rank != 0 and not group.workers
        if group.group_rank == 0:
            store.set("beat", str(int(now)))
        elif watches:
            beat = store.get("beat").decode()
            if beat != self._last_beat:
                self._last_beat = beat
                self._last_beat_at = now
        silent = watches and now - self._last_beat_at > LOST

        # Another node may have reported a failure.
        if store.check(["failed"]):
            self._failed_at = self._failed_at or now
        return silent or (self._failed_at is not None and now - self._failed_at > END)

    def _count_failure(self, store: Store) -> None:
        """Count one failure of the whole run, and what remains of its restarts."""
        # Several nodes may notice the failure. The first one counts it, the others wait for that.
        if store.add("failed", 1) == 1:
            self._everything.add("failures", 1)
            store.set("counted", "1")
        store.wait(["counted"], timedelta(seconds=END))

        # Count the restarts that are left, also those of failures that other nodes noticed.
        self.code = ERROR
        left = -1  # a run that should stop is not started again
        if not store.check(["stop"]):
            left = self._nodes.restarts - self._everything.add("failures", 0)
        self._remaining_restarts = max(0, left + 1)  # torch's agent subtracts one
        if self._nodes.restarts:
            if left >= 0:
                say(f"{self._name}: restarting; {left} restarts are left")
            else:
                say(f"{self._name}: no restarts are left")


def _end_without_rendezvous(agent: Agent, nodes: Nodes) -> None:
    """End this node if the node of the rendezvous does not answer any more."""
    last = time.monotonic()
    while time.monotonic() - last < LOST:
        time.sleep(BEAT)
        if answers(nodes):
            last = time.monotonic()
    if not agent.ended:
        say(lost(nodes))
        agent._shutdown(signal.SIGKILL, timeout=2)
        _exit(agent.folder, ERROR)


def run(task: AgentTask) -> int:
    """Train on this node until the run ends; return oneloop's exit code.

    Raises:
        BadInput: wrong options, or nodes that were started with other ones.
        OSError: the rendezvous or another node does not answer.
    """
    # Set the variables of accelerate's launcher and of torch's agent.
    nodes = task.nodes
    variables, training, processes = accelerate_variables(task.words, nodes)
    os.environ |= variables
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are handled here
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    # Check the settings and the recipe before this node waits for others.
    from oneloop.launch.processes import reject_strategy

    reject_strategy(
        sharding=os.environ.get("ACCELERATE_USE_FSDP") == "true", elastic=nodes.least < nodes.most
    )
    recipe = read_once(tuple(training)) if task.module == "oneloop.train" else None
    say(f"{nodes}; processes on this node: {processes}")

    # Open the store. The first node writes its command there, and the others compare theirs.
    store, holds = open_store(nodes)
    mine = f"--nodes {nodes.least}:{nodes.most} {' '.join(training)}"
    other = store.compare_set("command", "", mine).decode()
    if other != mine:
        raise BadInput(
            f"start the same command on all nodes: another was started with {other!r}, this "
            f"with {mine!r}"
        )

    # Build the agent.
    address = address_towards(nodes.host, nodes.port)
    os.environ[HOST] = f"{socket.gethostname()} ({address})"
    handler = rendezvous_handler(nodes, store, address)
    spec = WorkerSpec(
        role="oneloop",
        local_world_size=processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-m", task.module, *training),
        max_restarts=nodes.restarts,
        monitor_interval=0.2,
    )
    agent = Agent(spec, nodes, Path(task.folder), recipe, store)
    on_stops(agent.stop)
    if not holds:
        threading.Thread(target=_end_without_rendezvous, args=(agent, nodes), daemon=True).start()

    # Train. The first node that ends tells the others the exit code.
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
        say(lost(nodes))
    finally:
        agent.ended = True
        with suppress(RendezvousError, DistError):
            handler.shutdown()
    return agent.code


def main() -> NoReturn:
    """Run the agent that the first argument, an AgentTask, describes.

    Exit with oneloop's exit code.
    """
    logging.disable(logging.ERROR)  # the messages of torch's agent name no remedy
    given = json.loads(sys.argv[1])
    task = AgentTask(Nodes(**given["nodes"]), given["words"], given["module"], given["folder"])

    # Until the agent runs, a signal ends this process.
    register_process()
    on_stops(lambda number, _: os._exit(STOPPED))
    try:
        code = run(task)
    except BadInput as error:
        say(str(error))
        code = BAD_INPUT
    except OSError as error:
        say(str(error))
        code = ERROR
    _exit(Path(task.folder), code)


def _exit(folder: Path, code: int) -> NoReturn:
    (folder / "exit_code").write_text(str(code))
    os._exit(code)  # without destructors: the store of another node may be gone


if __name__ == "__main__":
    main()
