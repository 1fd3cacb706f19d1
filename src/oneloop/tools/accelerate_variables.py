"""What one node of a run needs from accelerate: for elastic restarts, ``plan`` and ``doctor``."""

import os
from collections.abc import Sequence

from oneloop.basics.exit_codes import BadInput
from oneloop.launch.command import launch_options
from oneloop.launch.nodes import ACCELERATE, Nodes


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
