"""``oneloop launch``: accelerate's launcher, with oneloop's own exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml

from oneloop.checkpoint.orphans import die_with
from oneloop.errors import BAD_INPUT, ERROR, BadInput

_USAGE = """usage: oneloop launch [accelerate launch's options] RECIPE [--key value …]

  oneloop launch --config_file accelerate_configs/ddp.yaml digits --batch.size 128

Starts the training processes as `accelerate launch … -m oneloop.train RECIPE …` does, and exits with oneloop's own
code: 0 done, 1 error, 2 bad input, 3 diverged, 75 stopped (start again to go on).
`accelerate launch --help` lists its options, `python -m oneloop.train --help` the keys of a recipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``oneloop`` command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if words else BAD_INPUT
    command, *rest = words
    if command != "launch":
        print(f"oneloop: unknown command {command!r}; known: launch", file=sys.stderr)
        return BAD_INPUT
    return launch(rest)


def launch(words: Sequence[str]) -> int:
    """Runs ``accelerate launch`` and returns what oneloop.train meant to exit with."""
    if words and words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    try:
        options, training = _divided(words)
    except BadInput as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return BAD_INPUT
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options, "-m", "oneloop.train",
               *training]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="oneloop-") as folder:
        told = Path(folder) / "exit_code"
        process = subprocess.Popen(command, env={**os.environ, "ONELOOP_EXIT_FILE": str(told)},
                                   preexec_fn=partial(die_with, os.getpid()))  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the trainers too
        code = process.wait()
        if told.exists():
            return int(told.read_text())
    return code if code in (0, BAD_INPUT) else ERROR


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """accelerate's options, and from the recipe on the trainer's: accelerate's own parser says where they part.

    Raises:
        BadInput: what accelerate would answer with a traceback.
    """
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import is_fp8_available

    if not words:
        raise BadInput(
            "no recipe given; for example: oneloop launch --config_file accelerate_configs/single.yaml digits"
        )
    parsed = launch_command_parser().parse_args([*words])
    precision = parsed.mixed_precision
    if parsed.config_file is not None:
        try:
            config = yaml.safe_load(Path(parsed.config_file).read_text())
            precision = precision or config.get("mixed_precision")
        except OSError as error:
            raise BadInput(f"--config_file {parsed.config_file} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, AttributeError) as error:
            raise BadInput(f"--config_file {parsed.config_file} is not an accelerate config file") from error
    if precision == "fp8" and not is_fp8_available():
        raise BadInput("mixed_precision fp8 needs torchao or transformer-engine, and neither is installed; use bf16")
    training = [parsed.training_script, *parsed.training_script_args]
    return list(words[: len(words) - len(training)]), training


if __name__ == "__main__":
    sys.exit(main())
