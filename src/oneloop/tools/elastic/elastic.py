"""The agent of one node, which starts the node's training processes.

It starts them again after a failure. ``oneloop launch`` runs it if there are several nodes, or
restarts. It is torch's elastic agent, with oneloop's exit codes: only an error (1) leads to a
restart, and each attempt has a separate exit-code file. Ranks over which the batch does not divide
evenly are spares: no process is started for them.
"""

import json
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes
from typing import NoReturn

from torch.distributed import DistError  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    WorkerSpec,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, BadInput
from oneloop.basics.files import printable
from oneloop.basics.launcher import HOST, register_process
from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.launch.before_imports import read_once
from oneloop.launch.launched import end_early
from oneloop.supervise.crash_report import say
from oneloop.tools.elastic.agent import Agent
from oneloop.tools.elastic.clocks import show_clock
from oneloop.tools.elastic.rendezvous import (
    joined,
    lost,
    not_joined,
    rendezvous_handler,
)
from oneloop.tools.elastic.signed_backend import secret
from oneloop.tools.nodes import AgentTask, Nodes, accelerate_variables, address_towards

_OVER = "the run has ended on the other nodes"


def run(task: AgentTask) -> int:
    """Train on this node until the run ends; return oneloop's exit code.

    Raises:
        BadInput: wrong options, or nodes that were started with other ones.
        OSError, RendezvousError, DistError: the rendezvous or another node does not answer.
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

    reject_strategy(sharding=os.environ.get("ACCELERATE_USE_FSDP") == "true")
    groups = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    if nodes.least < nodes.most and groups > 1:
        raise BadInput(
            "hybrid sharding (HSDP) has a fixed number of processes; give one number of "
            "--nodes or fsdp2"
        )
    recipe = read_once(tuple(training)) if task.module == "oneloop.train" else None
    say(f"{nodes}; processes on this node: {processes}")

    # Open the store, and build the agent.
    key = secret(os.environ)
    if nodes.most == 1:
        key = token_bytes()
    store, holds = joined(nodes, training, key)
    address = address_towards(nodes.host, nodes.port)
    os.environ[HOST] = f"{socket.gethostname()} ({address})"
    handler = rendezvous_handler(nodes, store, address, key)
    spec = WorkerSpec(
        role="oneloop",
        local_world_size=processes,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-m", task.module, *training),
        max_restarts=nodes.restarts,
        monitor_interval=0.2,
    )
    agent = Agent(spec, nodes, Path(task.folder), recipe, store, holds=holds)
    on_stops(agent.stop)
    if holds:
        show_clock(store, os.environ[HOST])

    # Train. The first node that ends tells the others the exit code.
    try:
        agent.run()
        store.set("final", str(agent.code))
    except RendezvousTimeoutError:
        say(not_joined(nodes, handler))
    except RendezvousClosedError:
        say(printable(store.get("wrong").decode()) if store.check(["wrong"]) else _OVER)
        agent.code = int(store.get("final")) if store.check(["final"]) else ERROR
    except BadInput as error:
        # nodes that wait for this one end, too
        if not agent.refused:
            store.set("wrong", str(error))
            store.set("final", str(BAD_INPUT))
        raise
    except RendezvousStateError as error:
        say(str(error))
    except (RendezvousError, DistError):
        code = agent.reported()
        if code is not None:
            agent.code = code
        if agent.code == ERROR:
            say(lost(nodes) if store.lost else "another node does not answer; see its output")
    finally:
        with suppress(RendezvousError, DistError):
            if not agent.refused:
                handler.shutdown()
            agent.leave()
    return agent.code


def main() -> NoReturn:
    """Run the agent that the first argument, an AgentTask, describes.

    Exit with oneloop's exit code.
    """
    logging.disable(logging.ERROR)  # the messages of torch's agent name no remedy
    given = json.loads(sys.argv[1])
    nodes = Nodes(**given.pop("nodes"))
    task = AgentTask(nodes=nodes, **given)
    die_with(task.parent)

    # Until the agent runs, a signal ends this process.
    register_process()
    on_stops(end_early)
    try:
        code = run(task)
    except BadInput as error:
        say(str(error))
        code = BAD_INPUT
    except OSError as error:
        say(str(error))
        code = ERROR
    except (RendezvousError, DistError):
        say(lost(task.nodes))
        code = ERROR
    (Path(task.folder) / "exit_code").write_text(str(code))
    os._exit(code)  # without destructors: the store of another node may be gone


if __name__ == "__main__":
    main()
