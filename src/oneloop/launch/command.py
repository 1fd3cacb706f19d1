"""``oneloop launch``: accelerate's launcher, with oneloop's exit codes."""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import module_of, required
from oneloop.basics.launcher import exit_file_variable
from oneloop.launch import hidden_modules
from oneloop.launch.config_files import config_file, read_config
from oneloop.launch.launched import Launched
from oneloop.launch.nodes import ACCELERATE, PORT, Nodes, nodes, options

ON_PROCESSES = ("evaluate", "predict")
"""commands that oneloop launch runs on several processes, in place of a recipe"""


_CPP_LOG = "TORCH_CPP_LOG_LEVEL"


def hide_warnings_of_torch() -> None:
    """Hide C++ warnings, such as those of a rendezvous; call it before torch is imported."""
    os.environ.setdefault(_CPP_LOG, "ERROR")


@dataclass(frozen=True)
class AgentTask:
    """The work of one agent of the tool ``elastic``, whose first argument it is, as JSON."""

    nodes: Nodes
    words: list[str]  # options of accelerate, recipe and keys
    module: str  # that the training processes run
    folder: str  # for exit codes and process ids
    parent: int  # the process with whose end the agent ends


class _Start(NamedTuple):
    """The process to start: the training process itself, or one that starts it."""

    command: list[str]
    variables: dict[str, str]  # of the environment, besides those of this process


def launch(
    words: Sequence[str],
    *,
    module: str = "oneloop.train",
    seconds: float = math.inf,
    output: int | None = None,
) -> int:
    """Start a run and wait for its end.

    One process is started directly. Several are started by accelerate's launcher or, for several
    nodes or restarts, by the agent in the tool ``elastic``.

    Args:
        words: options of the launcher; recipe and keys, or ``evaluate`` or ``predict`` and its
            words.
        module: the module that the processes run.
        seconds: time after which the processes are killed.
        output: file descriptor to which the processes write; None: this process's streams.

    Returns:
        oneloop's exit code.

    Raises:
        BadInput: invalid options, for which accelerate would print a traceback, and wrong keys
            that need no import of torch.
        TimeoutError: the run takes longer than ``seconds``.
    """
    from oneloop.recipe.parse import check_keys  # 0.3 s, which no other command needs

    node_options, words = options(words)
    run_nodes = nodes(node_options, os.environ)

    # Find the recipe without accelerate, whose import takes seconds, if its options are known.
    known = split_words(words)
    variables: dict[str, str] | None = None  # of a process that can be started directly
    if known is None:
        recipe_words = launch_options(words)[1]
    else:
        known_options, recipe_words = known
        if run_nodes is None:
            variables = _of_one_process(known_options)

    # Check the words before anything slow. Modules other than oneloop.train take other words.
    if module == "oneloop.train" and recipe_words[0] in ON_PROCESSES:
        command, *more = recipe_words
        required(command).parsed(command, more)
        module = module_of("evaluate or predict")
    elif module == "oneloop.train":
        hidden_modules.reject(recipe_words)
        check_keys(recipe_words)

    # accelerate's own parser reads all other options. They may name several machines.
    accelerate_options: list[str] = []
    if run_nodes is None and variables is None:
        accelerate_options, recipe_words, run_nodes = launch_options(words)

    with tempfile.TemporaryDirectory(prefix="oneloop-") as folder:
        if run_nodes is not None:
            start = _by_agent(AgentTask(run_nodes, words, module, folder, os.getpid()))
        elif variables is not None:
            start = _directly(["-m", module, *recipe_words], variables)
        else:
            start = _by_accelerate([*accelerate_options, "-m", module, *recipe_words])
        environment = {**os.environ, **exit_file_variable(Path(folder)), **start.variables}
        started = Launched(start.command, environment, Path(folder), output=output)
        return started.ended(time.monotonic() + seconds)


def _directly(words: list[str], variables: dict[str, str]) -> _Start:
    """Start one training process, which saves when it notices the end of this process."""
    return _Start([sys.executable, *words], variables)


def _by_accelerate(words: list[str]) -> _Start:
    """Start accelerate's launcher, which starts the training processes of this node."""
    command = [sys.executable, "-m", "oneloop.launch.accelerate_launch", str(os.getpid()), *words]
    return _Start(command, {"PET_SIGNALS_TO_HANDLE": "SIGQUIT"})


def _by_agent(task: AgentTask) -> _Start:
    """Start the agent of this node, which starts, and restarts, the training processes."""
    command = [
        sys.executable,
        "-m",
        module_of("several nodes or restarts"),
        json.dumps(asdict(task)),
    ]
    return _Start(command, {_CPP_LOG: os.environ.get(_CPP_LOG, "ERROR")})


_ONE_PROCESS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""settings of a config file with which accelerate only sets the variables of
:func:`_of_one_process`"""


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """Split the launcher's options from the recipe's words without accelerate.

    Return None for an option that only accelerate's parser knows. Raise BadInput without a recipe.
    """
    known, rest = options(words, names=("config_file", "mixed_precision", "num_processes"))
    if not rest:
        raise BadInput("no recipe given; for example: oneloop launch --config_file single digits")
    return None if rest[0].startswith("-") else (known, rest)


def _of_one_process(options: dict[str, str]) -> dict[str, str] | None:
    """Return the variables that accelerate's launcher sets for one process.

    With them, the process needs no launcher. Return None for several processes, and for settings
    that accelerate must read.
    """
    # Read the config file. Options override it.
    typed = dict(options)
    if "config_file" not in typed:
        return None
    settings = read_config(typed.pop("config_file")) | typed

    # All other settings must be those of one process.
    precision = str(settings.pop("mixed_precision", "no"))
    plain = all(str(value) == str(_ONE_PROCESS.get(key)) for key, value in settings.items())
    if not plain or "distributed_type" not in settings or precision not in ("no", "bf16", "fp16"):
        return None

    return {
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def launch_options(words: Sequence[str]) -> tuple[list[str], list[str], Nodes | None]:
    """Split accelerate's options from the rest with accelerate's own parser.

    Args:
        words: options, recipe and keys.

    Returns:
        accelerate's options, with the path of the config file in place of its short name; the
        recipe and its keys; the nodes if the options or the config file name several.

    Raises:
        BadInput: invalid options.
    """
    # Divide the words at the recipe.
    parsed = _parsed(words)
    training = [parsed.training_script, *parsed.training_script_args]
    given = list(words[: len(words) - len(training)])
    precision = parsed.mixed_precision

    # Read the config file. Its path takes the place of its short name.
    config: dict[str, Any] = {}
    file = parsed.config_file
    if file is not None:
        path = config_file(file)
        for place, option in enumerate(given):
            if option in (file, f"--config_file={file}", f"--config-file={file}"):
                given[place] = option.replace(file, path)
        config = read_config(file)
        precision = precision or config.get("mixed_precision")

    # accelerate itself would fail in each process.
    from accelerate.utils import is_fp8_available

    if precision == "fp8" and not is_fp8_available():
        raise BadInput(
            "mixed_precision fp8 needs torchao or transformer-engine, and neither is "
            "installed; use bf16"
        )
    return given, training, _nodes_of_accelerate(parsed, config)


def _parsed(words: Sequence[str]) -> Any:
    """Return the namespace of accelerate's parser. Raise BadInput for invalid options."""
    from accelerate.commands.launch import launch_command_parser

    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            parsed, unknown = launch_command_parser().parse_known_args([*words])
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        # The parser prints its usage, then "program: error: reason".
        reason = stderr.getvalue().strip().splitlines()[-1].rpartition("error: ")[2]
        reason = reason.replace("training_script_args", "").replace("training_script, ", "a recipe")
        raise BadInput(
            f"{reason}; for example: oneloop launch --config_file single digits"
        ) from None
    if unknown:
        raise BadInput(
            f"{unknown[0]} is not an option of accelerate launch; keys follow the recipe: "
            f"oneloop launch --config_file single RECIPE {unknown[0]} …"
        )
    return parsed


def _nodes_of_accelerate(parsed: Any, config: dict[str, Any]) -> Nodes | None:
    """Return the nodes that accelerate's options or its config file name; None for one.

    Raise BadInput if the nodes cannot be used.
    """

    def setting(name: str) -> Any:
        return getattr(parsed, name) or config.get(name)

    # Options override the config file.
    machines = int(setting("num_machines") or 1)
    processes = int(setting("num_processes") or 0)  # of all machines
    host = setting("main_process_ip")
    port = setting("main_process_port")
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
        port=int(port or PORT),
        processes=processes // machines,
        source=ACCELERATE,
    )


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
