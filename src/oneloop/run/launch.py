"""``oneloop launch``: accelerate's launcher, with oneloop's own exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import yaml

from oneloop.basics.errors import BAD_INPUT, ERROR, BadInput
from oneloop.basics.orphans import die_with
from oneloop.machine.configs import config_file, config_files


def launch(words: Sequence[str], *, after: Sequence[str] = ()) -> int:
    """Runs ``accelerate launch`` and returns what oneloop.train meant to exit with.

    Args:
        words: accelerate's options, the recipe, and its keys.
        after: names of commands that stand in the place of a recipe.

    Raises:
        BadInput: what accelerate would answer with a traceback.
    """
    options, training = launch_options(words)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        *options,
        "-m",
        "oneloop.apply" if training and training[0] in after else "oneloop.train",
        *training,
    ]
    with tempfile.TemporaryDirectory(prefix="oneloop-") as folder:
        told = Path(folder) / "exit_code"
        process = subprocess.Popen(
            command, env={**os.environ, "ONELOOP_EXIT_FILE": str(told)}, preexec_fn=partial(die_with, os.getpid())
        )
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the trainers too
        code = process.wait()
        if told.exists():
            return int(told.read_text())
    return code if code in (0, BAD_INPUT) else ERROR


def launch_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """accelerate's options, and from the recipe on the trainer's: accelerate's own parser says where they part.

    Raises:
        BadInput: what accelerate would answer with a traceback.
    """
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import is_fp8_available

    if not words:
        raise BadInput("no recipe given; for example: oneloop launch --config_file single digits")
    said = StringIO()
    try:
        with redirect_stderr(said):
            parsed, unknown = launch_command_parser().parse_known_args([*words])
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        why = said.getvalue().strip().splitlines()[-1].rpartition("error: ")[2].replace("training_script_args", "")
        why = why.replace("training_script, ", "a recipe")
        raise BadInput(f"{why}; for example: oneloop launch --config_file single digits") from None
    if unknown:
        raise BadInput(
            f"{unknown[0]} is no option of accelerate launch; the keys of a recipe come after its name: oneloop launch"
            f" --config_file single RECIPE {unknown[0]} …"
        )
    training = [parsed.training_script, *parsed.training_script_args]
    options, file = list(words[: len(words) - len(training)]), parsed.config_file
    precision = parsed.mixed_precision
    if file is not None:
        path = config_file(file)
        typed = (file, f"--config_file={file}", f"--config-file={file}")
        options = [option.replace(file, path) if option in typed else option for option in options]
        try:
            config = yaml.safe_load(Path(path).read_text())
            precision = precision or config.get("mixed_precision")
        except OSError as error:
            raise BadInput(
                f"--config_file {file} cannot be read: {error.strerror}; give a file, or one of"
                f" {', '.join(config_files())}"
            ) from error
        except (yaml.YAMLError, AttributeError) as error:
            raise BadInput(f"--config_file {file} is not an accelerate config file") from error
    if precision == "fp8" and not is_fp8_available():
        raise BadInput("mixed_precision fp8 needs torchao or transformer-engine, and neither is installed; use bf16")
    return options, training
