"""The nodes (hosts) of a run.

They come from the options of ``oneloop launch``, or from the environment of a scheduler.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from oneloop.basics.duration import seconds
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import module_of
from oneloop.launch.command import hide_warnings_of_torch, launch_options

PORT = 29400
ACCELERATE = "accelerate's options"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run."""

    least: int  # the run trains if at least this many nodes have joined
    most: int
    host: str  # name or address of the node that holds the rendezvous
    port: int = PORT
    processes: int | None = None  # per node; None: one per GPU, or one
    restarts: int = 0  # restarts after a failure; a node that joins does not count
    rejoin: float = 300.0  # seconds to wait for the least number of nodes
    source: str = "options"

    def __str__(self) -> str:
        if self.most == 1:
            return f"one node, up to {self.restarts} restarts"
        number = f"{self.least}"
        if self.least != self.most:
            number += f" to {self.most}"
        each = f", {self.processes} processes each" if self.processes else ""
        return f"{number} nodes{each}, rendezvous at {self.host}:{self.port} (from {self.source})"


def nodes(given: Mapping[str, str], environ: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of a run; None for one node without restarts.

    Args:
        given: the options of :data:`oneloop.launch.command.NODE_OPTIONS`.
        environ: the environment, in which schedulers set variables.

    Raises:
        BadInput: wrong options, or two schedulers disagree.
    """
    # Read the environment.
    schedulers = (_of_torchrun(environ), _of_slurm(environ))
    found = [known for known in schedulers if known is not None]
    for other in found[1:]:
        if (other.least, other.most) != (found[0].least, found[0].most):
            raise BadInput(
                f"two sources disagree: {found[0]}; {other}; give --nodes and --rendezvous"
            )
    known = found[0] if found else None

    # Options override it.
    if "nodes" in given:
        least, most = _range(given["nodes"])
        known = replace(known or Nodes(least, most, host=""), least=least, most=most)
    elif known is None and given:
        known = Nodes(1, 1, "127.0.0.1")
    if known is None:
        return None
    if "rendezvous" in given:
        host, port = _endpoint(given["rendezvous"])
        known = replace(known, host=host, port=port)
    elif known.most == 1:
        known = replace(known, host="127.0.0.1", port=0)
    if not known.host:
        raise BadInput(
            f"--nodes {given['nodes']} needs the address of one node, the same on all of them: "
            f"--nodes {given['nodes']} --rendezvous FIRST_HOST:{PORT}"
        )

    # These options only add to what is known.
    if "processes_per_node" in given:
        known = replace(known, processes=_whole(given, "processes_per_node", 1))
    if "max_restarts" in given:
        known = replace(known, restarts=_whole(given, "max_restarts", 0))
    if "rejoin" in given:
        known = replace(known, rejoin=seconds(given["rejoin"], "--rejoin"))
    if {"nodes", "rendezvous"} & given.keys():
        return replace(known, source="options")
    return known


def nodes_of_accelerate(settings: Mapping[str, Any]) -> Nodes | None:
    """Return the nodes that accelerate's settings name; None for one.

    Args:
        settings: accelerate's options and config file.

    Raises:
        BadInput: the nodes cannot be used.
    """
    machines = int(settings.get("num_machines") or 1)
    processes = int(settings.get("num_processes") or 0)  # of all machines
    host = settings.get("main_process_ip")
    if machines == 1:
        return None
    if not host or processes % machines:
        raise BadInput(
            f"{machines} machines need --main_process_ip, and --num_processes that they can "
            "share equally"
        )
    return Nodes(
        least=machines,
        most=machines,
        host=str(host),
        port=int(settings.get("main_process_port") or PORT),
        processes=processes // machines,
        source=ACCELERATE,
    )


@dataclass(frozen=True)
class AgentTask:
    """The work of the agent of one node, whose first argument it is, as JSON."""

    nodes: Nodes
    words: list[str]  # options of accelerate, recipe and keys
    module: str  # that the training processes run
    folder: str  # for exit codes and process ids
    parent: int  # the process with whose end the agent ends


def agent_words(nodes: Nodes, words: list[str], module: str, folder: str) -> list[str]:
    """Return Python's arguments that start the agent of this node, which starts the processes.

    Raise BadInput if the tool ``elastic`` was deleted.

    Args:
        nodes: the nodes of the run.
        words: options of accelerate, recipe and keys.
        module: the module that the processes run.
        folder: for exit codes and process ids.
    """
    hide_warnings_of_torch()
    task = AgentTask(nodes, words, module, folder, os.getpid())
    return ["-m", module_of("several nodes or restarts"), json.dumps(asdict(task))]


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the network that leads to ``host``.

    Raise OSError if no route exists.
    """
    # connecting a datagram socket sends nothing
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((host, port or 9))
        return str(unsent.getsockname()[0])


def _range(text: str) -> tuple[int, int]:
    # One number stands for both.
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = most = 0
    if match:
        least = int(match[1])
        most = int(match[2] or match[1])
    if least < 1:
        raise BadInput(
            f"--nodes {text} must be a number of nodes, or the least and the most of them: 2, 2:8"
        )
    if least > most:
        raise BadInput(
            f"--nodes {text}: the minimum {least} is above the maximum {most}; write {most}:{least}"
        )
    return least, most


def _endpoint(text: str) -> tuple[str, int]:
    place = text if ":" in text else f"{text}:{PORT}"
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadInput(
            f"--rendezvous {text} must be the address of one node, and a free port there: "
            f"HOST:{PORT}"
        )
    return host, int(port)


def _whole(given: Mapping[str, str], name: str, least: int) -> int:
    if not given[name].isdigit() or int(given[name]) < least:
        raise BadInput(f"--{name} must be a whole number, at least {least}; got {given[name]}")
    return int(given[name])


def _of_torchrun(environ: Mapping[str, str]) -> Nodes | None:
    """torchrun's variables, as Kubeflow Trainer sets them."""
    if environ.get("PET_NNODES", "1") in ("1", "1:1"):
        return None
    least, most = _range(environ["PET_NNODES"])
    own = (environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT"))
    place = environ.get("PET_RDZV_ENDPOINT") or ":".join(filter(None, own))
    host = ""
    port = PORT
    if place:
        host, port = _endpoint(place)
    typed = environ.get("PET_NPROC_PER_NODE", "")  # or gpu, cpu, auto
    each = int(typed) if typed.isdigit() else None
    return Nodes(least, most, host, port, each, source="PET_NNODES, …")


def _of_slurm(environ: Mapping[str, str]) -> Nodes | None:
    """Slurm's variables inside a step of srun.

    salloc's shell and a batch script have other variables.
    """
    number = environ.get("SLURM_STEP_NUM_NODES", "1")
    # steps that srun did not start have larger numbers
    if number == "1" or int(environ.get("SLURM_STEP_ID", "-1")) not in range(1 << 31):
        return None

    # oneloop starts the processes of a node itself.
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks):
        raise BadInput(
            f"srun starts {tasks} tasks per node, and oneloop launch needs one; add "
            "--ntasks-per-node=1"
        )

    # Take the first host of a list such as node[07-09,12],gpu1.
    first = re.match(r"([^,\[]*)(?:\[(\d+))?", environ.get("SLURM_STEP_NODELIST", ""))
    host = f"{first[1]}{first[2] or ''}" if first else ""
    port = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000  # two jobs may share a node
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    each = int(gpus) if gpus.isdigit() else None
    return Nodes(int(number), int(number), host, port, each, source="SLURM_STEP_NUM_NODES, …")


def accelerate_variables(
    words: Sequence[str], nodes: Nodes
) -> tuple[dict[str, str], list[str], int]:
    """Return what one node of a run needs from accelerate's launcher.

    Args:
        words: options, recipe and keys.
        nodes: the nodes of the run.

    Returns:
        the environment variables that accelerate's launcher would set for its options, and that
        differ from those of this process; the recipe and its keys; the number of processes per
        node.

    Raises:
        BadInput: invalid options, or options that do not fit the nodes.
    """
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    # accelerate's number is that of all machines, oneloop's that of one.
    options, training, _ = launch_options(words)
    for option in options:
        if nodes.source != ACCELERATE and option.startswith(("--num_processes", "--num-proc")):
            raise BadInput(
                "--num_processes counts the processes of all nodes; give --processes_per_node"
            )

    # Ask accelerate for the variables of one node: the agents connect the nodes.
    args = launch_command_parser().parse_args([*options, "-m", *training])
    try:
        args = _validate_launch_command(args)[0]
        processes = nodes.processes or torch.accelerator.device_count()
        if not processes:  # no GPU
            processes = 1 if nodes.most > 1 else args.num_processes
        args.num_machines = 1
        args.num_processes = processes
        args.main_process_port = 0
        variables = prepare_multi_gpu_env(args)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"accelerate rejects the options: {error}") from error

    # Reject a config file for another number of processes.
    if not (args.multi_gpu or args.use_fsdp) and processes * nodes.most > 1:
        raise BadInput(f"--config_file {args.config_file} is for one process; use ddp or fsdp2")
    if args.use_fsdp and processes * nodes.least < 2:
        raise BadInput(
            f"FSDP2 needs two processes, and {nodes.least} nodes may have one; raise the "
            "minimum of --nodes"
        )
    new = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return new, training, processes
