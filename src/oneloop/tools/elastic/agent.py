"""torch's elastic agent, for a training command with oneloop's exit codes."""

import math
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    RendezvousConnectionError,
)

from oneloop.basics.exit_codes import ERROR, STOPPED, BadInput
from oneloop.basics.launcher import FILE, HOST, report_exit_code
from oneloop.recipe.schema import Recipe
from oneloop.supervise.crash_report import say, stop_name
from oneloop.tools.elastic.bounded_store import LOST, BoundedStore
from oneloop.tools.elastic.clocks import clock_problem
from oneloop.tools.elastic.node_checks import compared, facts, foreign_folder, shared_file
from oneloop.tools.elastic.rendezvous import (
    END,
    announced,
    exchanged,
)
from oneloop.tools.nodes import Nodes, address_towards

_POLL = 0.1  # seconds between two looks


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
        holds: whether this process holds the store.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        nodes: Nodes,
        folder: Path,
        recipe: Recipe | None,
        store: BoundedStore,
        *,
        holds: bool,
    ) -> None:
        super().__init__(
            spec, DefaultLogsSpecs(), exit_barrier_timeout=END, shutdown_timeout=int(LOST)
        )
        self._nodes = nodes
        self.folder = folder
        self._recipe = recipe
        self._everything = store
        self._holds = holds
        self._name = os.environ[HOST]

        self._attempt = 0  # number of starts
        self._size = 1  # number of nodes in this attempt
        self._stop_requested = False
        self._looked_at = 0.0  # the last look at the processes
        self._last_beat = ""  # of rank 0's node
        self._last_beat_at = 0.0  # when it changed

        self.code = ERROR  # oneloop's exit code
        self.refused = False  # whether the others train, and this node may not join them

    def stop(self, number: int, frame: object) -> None:
        """Handle a stop signal, which the training processes get too; without any, end at once."""
        self._stop_requested = True
        if self._pcontext is None or not self._worker_group.workers:
            say(f"stopped by {stop_name(number)}; no process trains on this node")
            report_exit_code(STOPPED)
            os._exit(STOPPED)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._worker_group.workers = []
        if not self._holds and (wrong := clock_problem(self._everything, self._name)):
            self.refused = self._everything.check(["started"])
            raise BadInput(wrong)
        with announced(
            f"waiting for nodes to join: at least {self._nodes.least} within "
            f"{self._nodes.rejoin:.0f} s"
        ):
            super()._rendezvous(worker_group)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> Any:
        # torch's rendezvous drops nodes whose clock was changed, even below the minimum.
        self._size = group_world_size
        if group_world_size < self._nodes.least:
            raise ConnectionError(
                f"the rendezvous counts {group_world_size} nodes instead of {self._nodes.least} or "
                "more: a clock was changed meanwhile, or a link is slow; start the same command "
                "again"
            )
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
        with shared_file(folder, first=rank == 0) as file:
            mine = facts(self._name, address, processes, file)
            every = exchanged(store, "facts", mine, rank, nodes)

            # All nodes must see the file of the first one, which then deletes it.
            seen = exchanged(store, "seen", foreign_folder(self._name, every[0]), rank, nodes)

        # All nodes find the same error, and stop.
        for wrong in (*compared(every), *seen):
            if wrong:
                raise BadInput(wrong)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Forget the attempt before.
        self._attempt += 1
        self.code = ERROR
        self._last_beat = ""
        self._last_beat_at = self._looked_at = time.monotonic()
        os.environ[FILE] = str(self.folder / f"exit_code-{self._attempt}")
        if worker_group.group_rank == 0:
            self._everything.set("started", "1")
        if not worker_group.workers:  # all ranks of this node are spares
            return {}
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # torch's agent stops healthy processes if a node waits, which may be one that has failed.
        joins = worker_group.state is WorkerState.HEALTHY and not self._failed_elsewhere()
        if joins and worker_group.group_rank == 0:
            say("a node joins: saving, and starting again with it")

        # For a node that joins, the processes save before they end. Supervisors end a hang.
        if joins and worker_group.workers:
            for worker in worker_group.workers:
                with suppress(ProcessLookupError):
                    os.killpg(worker.id, signal.SIGTERM)
            self._until_ended(math.inf)
        self._shutdown(signal.SIGKILL, timeout=END)

    def _until_ended(self, seconds: float) -> WorkerState:
        """Wait until the processes of this node have ended, or another node has failed."""
        until = time.monotonic() + seconds
        while (state := self._state()) is WorkerState.HEALTHY and time.monotonic() < until:
            if self._failed_elsewhere():
                until = min(until, time.monotonic() + END)
            time.sleep(_POLL)
        return state

    def _state(self) -> WorkerState:
        """Return the state of this node. If it has no processes, the others report the end."""
        state = WorkerState.HEALTHY
        if self._worker_group.workers:
            state = super()._monitor_workers(self._worker_group).state
            reported = self.reported()
            # Ranks that a stop ends before they are connected exit with the code itself.
            if state is WorkerState.FAILED and reported == STOPPED:
                state = WorkerState.SUCCEEDED
            if state is WorkerState.SUCCEEDED:
                self.code = reported or 0
        elif self._store is not None and self._store.check(["ended"]):
            state = WorkerState.SUCCEEDED
            self.code = int(self._store.get("ended"))
        return state

    def _failed_elsewhere(self) -> bool:
        """Return whether a node has failed in this attempt."""
        return self._store is not None and self._store.check(["failed"])

    def reported(self) -> int | None:
        """Return the exit code that the processes of this node have reported, if any."""
        file = Path(os.environ[FILE])
        return int(file.read_text()) if self._worker_group.workers and file.exists() else None

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return super()._invoke_run(role)
        except (RendezvousConnectionError, DistError):
            # Without the store, processes that have come to the end of the run may still exit.
            until = time.monotonic() + LOST
            while self._worker_group.workers and self.reported() is None:
                if self._state() is not WorkerState.HEALTHY or time.monotonic() > until:
                    self._shutdown(signal.SIGKILL, timeout=END)
                    break
                time.sleep(_POLL)
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        store = self._store
        assert store is not None
        self._give_sign()
        if self._stop_requested:
            store.set("stop", "1")

        # Look at this node. If another node has failed, this one has some seconds to report that.
        state = self._state()
        if state is WorkerState.HEALTHY and not self._silent(store):
            if not self._failed_elsewhere():
                return RunResult(state)
            state = self._until_ended(END)

        # If the processes stopped only for a node that joins, torch's agent must start them again,
        # and not end: they count as healthy.
        waiting = self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        joins = waiting and not store.check(["stop"])
        if state is WorkerState.SUCCEEDED and self.code == STOPPED and joins:
            return RunResult(WorkerState.HEALTHY)

        # The run has ended, or failed.
        if state is WorkerState.SUCCEEDED and self.code != ERROR:
            store.set("ended", str(self.code))
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state, return_values=dict.fromkeys(ranks))
        self._count_failure(store)
        return RunResult(WorkerState.FAILED)

    def _give_sign(self) -> None:
        """Give a sign of life. Raise ConnectionError if this node has given none for too long."""
        now = time.monotonic()
        since = now - self._looked_at
        self._looked_at = now
        if not self._holds:
            self._everything.add("signs", 1)
        elif since > LOST and self._nodes.most > 1 and self.reported() in (None, ERROR):
            self._shutdown(signal.SIGKILL, timeout=END)
            raise ConnectionError(
                f"{self._name} was stopped for {since:.0f} s, and the other nodes have ended "
                "without its rendezvous; start the same command again"
            )

    def _silent(self, store: Store) -> bool:
        """Return whether rank 0's node has given no sign of life to this one.

        Only a node without processes looks: those of others have supervisors.
        """
        now = time.monotonic()
        if self._worker_group.group_rank == 0:
            store.set("beat", str(int(now)))
        elif not self._worker_group.workers:
            beat = store.get("beat").decode()
            if beat != self._last_beat:
                self._last_beat = beat
                self._last_beat_at = now
            return now - self._last_beat_at > LOST
        return False

    def leave(self) -> None:
        """Leave the run. The node that holds the store leaves last."""
        if self._store is None:
            return
        left = self._store.add("left", 1)
        signs = -1
        until = math.inf if self._holds else 0.0

        # Nodes that are lost give no signs of life.
        while left < self._size and time.monotonic() < until:
            new = self._everything.add("signs", 0)
            if new != signs:
                signs = new
                until = time.monotonic() + LOST
            time.sleep(_POLL)
            left = self._store.add("left", 0)

    def _count_failure(self, store: Store) -> None:
        """Count one failure of the whole run, and what remains of its restarts."""
        # Several nodes may notice the failure. The first one counts it, the others wait for that.
        if store.add("failed", 1) == 1:
            self._everything.add("failures", 1)
            store.set("counted", "1")
        with suppress(DistError):
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
