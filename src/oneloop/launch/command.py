"""``oneloop launch``: accelerate's launcher, with oneloop's exit codes."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, STOPPED, BadInput
from oneloop.basics.launcher import die_with, exit_file_variable, is_alive, on_stops
from oneloop.launch.nodes import ACCELERATE, PORT, Nodes, nodes, options

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "accelerate_configs", _PACKAGE.parents[1] / "accelerate_configs")
"""folders in an installed package, and in a checkout"""


def config_files() -> dict[str, Path]:
    """Return the packaged config files of accelerate by name."""
    folder = next(folder for folder in _FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_file(asked: str) -> str:
    """Return the path of a config file by its short name; an existing file of that name takes
    precedence."""
    found = None if Path(asked).is_file() else config_files().get(asked)
    return str(found) if found else asked


# the store of a rendezvous warns about each client without a host name
CPP_LOG = "TORCH_CPP_LOG_LEVEL"
_INTERVAL = 0.2  # seconds between two checks


def launch(
    words: Sequence[str],
    *,
    after: Sequence[str] = (),
    module: str = "oneloop.train",
    seconds: float = math.inf,
    output: int | None = None,
) -> int:
    """Start a run from these words (options of the launcher, recipe, keys), by accelerate's
    launcher or, for several nodes or restarts, by :mod:`oneloop.launch.elastic`; return oneloop's
    exit code.

    The processes run ``module``, or oneloop.apply if a command in ``after`` takes the place of the
    recipe. They write to the file descriptor ``output``. After ``seconds`` they are killed, and
    TimeoutError is raised. Raise BadInput for invalid options, for which accelerate would print a
    traceback, and for wrong keys that need no import of torch."""
    from oneloop.recipe.parse import check_keys  # 0.3 s, which no other command needs

    own, words = options(words)
    found, known, given = nodes(own, os.environ), _known_options(words), list[str]()
    environment = _of_one_process(known[0]) if known and found is None else None
    training = known[1] if known else launch_options(words)[1]
    launched = "oneloop.apply" if training[0] in after else module
    if launched == "oneloop.train":  # other modules take other words
        check_keys(training)
    if environment is None and found is None:
        given, training, found = launch_options(words)
    parent = None if environment else os.getpid()
    with tempfile.TemporaryDirectory(prefix="oneloop-") as folder:
        command = [sys.executable, "-m", launched, *training]
        if found is not None:
            task = {"nodes": asdict(found), "words": words, "module": launched, "folder": folder}
            command = [sys.executable, "-m", "oneloop.launch.elastic", json.dumps(task)]
            environment = {CPP_LOG: os.environ.get(CPP_LOG, "ERROR")}
        elif environment is None:
            accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
            command, environment = (
                [*accelerate, *given, *command[1:]],
                {"PET_SIGNALS_TO_HANDLE": "SIGTERM"},
            )
        environment = {**os.environ, **exit_file_variable(Path(folder)), **environment}
        begin = partial(_begin, parent)
        process = subprocess.Popen(
            command, env=environment, preexec_fn=begin, stdout=output, stderr=output
        )
        return _Launched(process, Path(folder)).ended(time.monotonic() + seconds)


_ONE_PROCESS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "gpu_ids": "all",
}
_ONE_PROCESS |= {
    "num_machines": 1,
    "num_processes": 1,
    "machine_rank": 0,
    "main_training_function": "main",
}
_ONE_PROCESS |= {
    "downcast_bf16": "no",
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
}
_ONE_PROCESS |= dict.fromkeys(
    ("debug", "enable_cpu_affinity", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"), False
)
"""settings of a config file with which accelerate only sets the variables of
:func:`_of_one_process`"""


def _known_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]] | None:
    """Split the launcher's options from the recipe's words without accelerate, whose import takes
    seconds. None: an option that only accelerate's parser knows, or no recipe."""
    options, rest = dict[str, str](), list(words)
    while rest and rest[0].startswith("--"):
        name, equals, value = rest.pop(0)[2:].partition("=")
        if name not in ("config_file", "mixed_precision", "num_processes") or not (equals or rest):
            return None
        options[name] = value if equals else rest.pop(0)
    return (options, rest) if rest and not rest[0].startswith("-") else None


def _of_one_process(options: dict[str, str]) -> dict[str, str] | None:
    """Return the variables that accelerate's launcher sets for one process, which then needs no
    launcher of accelerate's. None: several processes, or settings that accelerate must read."""
    try:
        config = yaml.safe_load(Path(config_file(options["config_file"])).read_text())
        settings = {**config, **{key: options[key] for key in options if key != "config_file"}}
    except (KeyError, OSError, TypeError, yaml.YAMLError):
        return None
    precision = str(settings.pop("mixed_precision", "no"))
    plain = all(str(value) == str(_ONE_PROCESS.get(key)) for key, value in settings.items())
    if not plain or "distributed_type" not in settings or precision not in ("no", "bf16", "fp16"):
        return None
    made = {
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_DYNAMO_BACKEND": "NO",
    }
    made |= {
        f"ACCELERATE_DYNAMO_USE_{key}": "False"
        for key in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION")
    }
    return {
        **made,
        "ACCELERATE_DYNAMO_MODE": "default",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _begin(parent: int | None) -> None:
    """Prepare the started process: it ignores SIGINT, which a terminal sends to the training
    processes, too. accelerate's dies with this ``parent``; a training process notices it, and
    saves."""
    if parent is not None:
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Launched:
    """accelerate's process and the training processes, to which signals are forwarded; ``folder``
    holds their ids."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder
        self._signals: list[int] = []
        self._forwarded: set[tuple[int, str]] = set()
        on_stops(self._record)

    def _record(self, number: int, frame: object) -> None:
        """Record a signal. SIGINT becomes SIGTERM: a terminal sends it to the trainers, too; two
        would kill them."""
        number = signal.SIGTERM if number == signal.SIGINT else number
        if number not in self._signals:
            self._signals.append(number)

    def ended(self, until: float) -> int:
        """Wait for all processes; return oneloop's exit code. Raise TimeoutError at the time
        ``until``."""
        while (code := self._poll()) is None:
            self._forward()
            if time.monotonic() > until:
                self._process.kill()  # the others end with it
                raise TimeoutError
        while self._alive():  # if accelerate was killed, they save and exit
            self._forward()
            time.sleep(_INTERVAL)
        file = self._folder / "exit_code"
        if file.exists():
            return int(file.read_text())
        if self._signals:
            return STOPPED
        if code not in (0, BAD_INPUT):
            print("oneloop: error: a process of this run was killed from outside", file=sys.stderr)
        return code if code in (0, BAD_INPUT) else ERROR

    def _poll(self) -> int | None:
        try:
            return self._process.wait(_INTERVAL)
        except subprocess.TimeoutExpired:
            return None

    def _forward(self) -> None:
        """Send each recorded signal once to each process, also to processes that start later."""
        for number in self._signals:
            for pid in self._alive():
                if (number, pid) not in self._forwarded:
                    self._forwarded.add((number, pid))
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), number)

    def _alive(self) -> list[str]:
        pids = [file.name.removeprefix("process-") for file in self._folder.glob("process-*")]
        return [pid for pid in pids if is_alive(int(pid))]


def launch_options(words: Sequence[str]) -> tuple[list[str], list[str], Nodes | None]:
    """Split accelerate's options from the rest with accelerate's own parser; also return the nodes
    if the options or the config file name several. Raise BadInput for invalid options."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import is_fp8_available

    if not words:
        raise BadInput("no recipe given; for example: oneloop launch --config_file single digits")
    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            parsed, unknown = launch_command_parser().parse_known_args([*words])
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        why = (
            stderr.getvalue()
            .strip()
            .splitlines()[-1]
            .rpartition("error: ")[2]
            .replace("training_script_args", "")
        )
        why = why.replace("training_script, ", "a recipe")
        raise BadInput(f"{why}; for example: oneloop launch --config_file single digits") from None
    if unknown:
        example = f"oneloop launch --config_file single RECIPE {unknown[0]} …"
        raise BadInput(
            f"{unknown[0]} is not an option of accelerate launch; keys follow the recipe: {example}"
        )
    training = [parsed.training_script, *parsed.training_script_args]
    given, file = list(words[: len(words) - len(training)]), parsed.config_file
    precision, config = parsed.mixed_precision, dict[str, Any]()
    if file is not None:
        path = config_file(file)
        typed = (file, f"--config_file={file}", f"--config-file={file}")
        given = [option.replace(file, path) if option in typed else option for option in given]
        try:
            config = yaml.safe_load(Path(path).read_text())
            precision = precision or config.get("mixed_precision")
        except OSError as error:
            known = ", ".join(config_files())
            raise BadInput(
                f"--config_file {file} cannot be read: {error.strerror}; known: {known}"
            ) from error
        except (yaml.YAMLError, AttributeError) as error:
            raise BadInput(f"--config_file {file} is not an accelerate config file") from error
    if precision == "fp8" and not is_fp8_available():
        raise BadInput(
            "mixed_precision fp8 needs torchao or transformer-engine, and neither is "
            "installed; use bf16"
        )
    names = ("num_machines", "num_processes", "main_process_ip", "main_process_port")
    found = {name: getattr(parsed, name) or config.get(name) for name in names}
    number, processes = int(found["num_machines"] or 1), int(found["num_processes"] or 0)
    if number == 1:
        return given, training, None
    if not found["main_process_ip"] or processes % number:
        raise BadInput(
            f"{number} machines need --main_process_ip, and --num_processes that they can "
            "share equally"
        )
    place = str(found["main_process_ip"]), int(found["main_process_port"] or PORT)
    return given, training, Nodes(number, number, *place, processes // number, source=ACCELERATE)


def accelerate_variables(
    words: Sequence[str], nodes: Nodes
) -> tuple[dict[str, str], list[str], int]:
    """Return the variables that accelerate's launcher would set for its options, the recipe's
    words, and the number of processes per node. Raise BadInput."""
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options, training, _ = launch_options(words)
    if nodes.source != ACCELERATE and any(
        option.startswith(("--num_processes", "--num-proc")) for option in options
    ):
        raise BadInput(
            "--num_processes counts the processes of all nodes; give --processes_per_node"
        )
    args = launch_command_parser().parse_args([*options, "-m", *training])
    try:
        args = _validate_launch_command(args)[0]
        processes = nodes.processes or torch.accelerator.device_count()
        processes = processes or (1 if nodes.most > 1 else args.num_processes)
        args.num_machines, args.num_processes, args.main_process_port = 1, processes, 0
        made = prepare_multi_gpu_env(args)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"accelerate rejects the options: {error}") from error
    if not (args.multi_gpu or args.use_fsdp) and processes * nodes.most > 1:
        raise BadInput(f"--config_file {args.config_file} is for one process; use ddp or fsdp2")
    if args.use_fsdp and processes * nodes.least < 2:
        raise BadInput(
            f"FSDP2 needs two processes, and {nodes.least} nodes may have one; raise the "
            "minimum of --nodes"
        )
    return (
        {name: value for name, value in made.items() if os.environ.get(name) != value},
        training,
        processes,
    )
