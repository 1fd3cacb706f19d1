"""``oneloop launch``: accelerate's launcher, with oneloop's exit codes."""

import math
import os
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE, BadInput
from oneloop.basics.houses import module_of, required
from oneloop.basics.launcher import exit_file_variable
from oneloop.launch import hidden_modules
from oneloop.launch.config_files import config_file, config_files, read_config
from oneloop.launch.launched import Launched

ON_PROCESSES = ("evaluate", "predict")
"""commands that oneloop launch runs on several processes, in place of a recipe"""
NODE_OPTIONS = ("nodes", "rendezvous", "processes_per_node", "max_restarts", "rejoin")
"""options of the tool that trains on several nodes, or with restarts"""
_SCHEDULERS = {"PET_NNODES", "SLURM_STEP_NUM_NODES"}
"""variables of schedulers that may name several nodes"""


def hide_warnings_of_torch() -> None:
    """Hide C++ warnings, such as those of a rendezvous; call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def launch(words: Sequence[str]) -> int:
    """Start the training processes by accelerate's launcher, and return oneloop's exit code.

      oneloop launch --config_file ddp digits --batch.size 128

    Like `accelerate launch … -m oneloop.train RECIPE …`, but with oneloop's exit codes: 0 done, 1
    error, 2 bad input, 3 diverged, 75 stopped (start the same command again to resume). A recipe is
    a packaged name, a YAML file or a task (my_task.py:MyTask). --config_file takes a config file of
    accelerate or one of: CONFIGS. `accelerate launch --help` lists its options,
    `python -m oneloop.train --help` the keys of a recipe. Several nodes: --nodes 2:8 (least and
    most), --rendezvous HOST:PORT, --processes_per_node, --max_restarts 3, --rejoin 5min.
    """
    if words and words[0] in ("-h", "--help"):
        about = (launch.__doc__ or "").replace("CONFIGS", ", ".join(config_files()))
        usage = "oneloop launch [accelerate's OPTIONS] RECIPE [--key value …]"
        Options("launch", about, usage=usage).print_help()
        return DONE
    return run_processes(words)


def run_processes(
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

    node_options, words = split(words, NODE_OPTIONS)
    nodes = None
    if node_options or _SCHEDULERS & os.environ.keys():
        nodes = required("nodes").nodes(node_options, os.environ)

    # Find the recipe without accelerate, whose import takes seconds, if its options are known.
    known = split_words(words)
    if known is None:
        recipe_words = launch_options(words)[1]
    else:
        known_options, recipe_words = known
        words = [*(f"--{name}={value}" for name, value in known_options.items()), *recipe_words]

    # Check the words before anything slow. Modules other than oneloop.train take other words.
    if module == "oneloop.train" and recipe_words[0] in ON_PROCESSES:
        command, *more = recipe_words
        required(command).parsed(command, more)
        module = module_of("evaluate or predict")
    elif module == "oneloop.train":
        hidden_modules.reject(recipe_words)
        check_keys(recipe_words)

    # One process can be started directly, with these variables.
    variables: dict[str, str] | None = None
    if nodes is None and known is not None:
        variables = _of_one_process(known_options)

    # accelerate's own parser reads all other options. They may name several machines.
    options: list[str] = []
    if nodes is None and variables is None:
        options, recipe_words, settings = launch_options(words)
        if int(settings.get("num_machines") or 1) > 1:
            nodes = required("nodes").nodes_of_accelerate(settings)

    with tempfile.TemporaryDirectory(prefix="oneloop-") as folder:
        environment = exit_file_variable(Path(folder))
        start = ["-m", module, *recipe_words]
        if nodes is not None:
            # The agent of this node starts, and restarts, the training processes.
            start = required("nodes").agent_words(nodes, words, module, folder)
        elif variables is not None:
            # One training process saves when it notices the end of this process.
            environment |= variables
        else:
            # accelerate's launcher starts the training processes.
            launcher = ["-m", "oneloop.launch.accelerate_launch", str(os.getpid())]
            start = [*launcher, *options, *start]
            environment["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        environment = {**os.environ, **environment}
        run = Launched([sys.executable, *start], environment, Path(folder), output=output)
        return run.ended(time.monotonic() + seconds)


def split(words: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the options of these names from the other words.

    Raise BadInput for an option without a value.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _reject  # type: ignore[method-assign]
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    options, rest = parser.parse_known_args(words)
    return {name: text for name, text in vars(options).items() if text is not None}, rest


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """Split the launcher's options from the recipe's words without accelerate.

    Return None for an option that only accelerate's parser knows. Raise BadInput without a recipe.
    """
    known, rest = split(words, ("config_file", "mixed_precision", "num_processes"))
    if not rest:
        raise BadInput("no recipe given; for example: oneloop launch --config_file single digits")
    return None if rest[0].startswith("-") else (known, rest)


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


def _of_one_process(options: dict[str, str]) -> dict[str, str] | None:
    """Return the variables that accelerate's launcher sets for one process.

    With them, the process needs no launcher. Return None for several processes, and for settings
    that accelerate must read.
    """
    if "config_file" not in options:
        return None
    settings = read_config(options["config_file"]) | options
    precision = str(settings.pop("mixed_precision", "no"))
    del settings["config_file"]
    plain = all(str(value) == str(_ONE_PROCESS.get(name)) for name, value in settings.items())
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


def launch_options(words: Sequence[str]) -> tuple[list[str], list[str], dict[str, Any]]:
    """Split accelerate's options from the rest with accelerate's own parser.

    Args:
        words: options, recipe and keys.

    Returns:
        accelerate's options, with the path of the config file in place of its short name; the
        recipe and its keys; accelerate's settings, of the options and of the config file.

    Raises:
        BadInput: invalid options.
    """
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import is_fp8_available

    # Divide the words at the recipe.
    parser = launch_command_parser()
    parser.error = _reject
    parsed, unknown = parser.parse_known_args([*words])
    if unknown:
        raise BadInput(
            f"{unknown[0]} is not an option of accelerate launch; keys follow the recipe: "
            f"oneloop launch --config_file single RECIPE {unknown[0]} …"
        )
    training = [parsed.training_script, *parsed.training_script_args]
    given, rest = split(words[: len(words) - len(training)], ("config_file",))

    # Read the config file, which options override. Its path takes the place of its short name.
    settings: dict[str, Any] = {}
    if parsed.config_file is not None:
        rest[:0] = ["--config_file", config_file(parsed.config_file)]
        settings = read_config(parsed.config_file)
    for name, value in vars(parsed).items():
        if value:
            settings[name] = value

    # accelerate itself would fail in each process.
    if settings.get("mixed_precision") == "fp8" and not is_fp8_available():
        raise BadInput(
            "mixed_precision fp8 needs torchao or transformer-engine, and neither is "
            "installed; use bf16"
        )
    return rest, training, settings


def _reject(message: str) -> NoReturn:
    """Raise BadInput for an error of a parser, in place of its usage and exit."""
    reason = message.removeprefix("argument ").replace("expected one argument", "needs a value")
    reason = reason.replace("training_script_args", "").replace("training_script, ", "a recipe")
    raise BadInput(f"{reason}; for example: oneloop launch --config_file single digits")
