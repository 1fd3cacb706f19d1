"""Short real runs in other processes, which may crash, hang or run out of memory."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BAD_INPUT, STOPPED, BadInput
from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.launch.command import run_processes, split
from oneloop.tools.server_context import server_context

Start = Callable[[Sequence[str], Path], int]
"""runs ``oneloop launch`` with these arguments; output goes to the file; returns the exit code, or
raises TimeoutError"""
SECONDS = 1800.0  # time limit of one run
_MODULE = "oneloop.tools.prove.recorded_run"

# Keys of every run.
_KEYS = {
    "eval.every": 0,
    "stop.patience": 0,
    "save.every": 0,
    "save.best": False,
    "save.final": "last",
    "save.mirror": None,
    "watch.output": "progress",
    "watch.profile": None,
    "watch.memory": None,
    "track": "none",
    "run.resume": "auto",
    "stop.after": None,
    "debug.dry_run": False,
}


class RunFailed(RuntimeError):
    """A run ended with an error."""


def as_arguments(keys: Mapping[str, Any]) -> list[str]:
    """Return keys as command-line arguments: ``--batch.micro 16``."""
    arguments = []
    for key, value in keys.items():
        arguments += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def train_briefly(
    start: Start, folder: Path, words: Sequence[str], keys: Mapping[str, Any]
) -> None:
    """Train a recipe into a new folder; the output goes to the file FOLDER.txt beside it.

    Args:
        start: Starts the run.
        folder: The run folder.
        words: Options of the launcher, the argument of ``recorded_run``, the recipe and its keys.
        keys: More keys.

    Raises:
        BadInput: The run rejects the recipe.
        RunFailed: The run ended with an error, or took too long.
    """
    name = folder.name
    output = Path(f"{folder}.txt")
    keys = {**_KEYS, **keys, "run.dir": str(folder)}
    try:
        code = start([*words, *as_arguments(keys)], output)
    except TimeoutError as error:
        raise RunFailed(f"the {name} run {error}") from None

    text = output.read_text(encoding="utf-8", errors="replace").strip()
    if code == BAD_INPUT:
        raise BadInput(text.rpartition("oneloop: ")[2])
    if code == STOPPED:
        sys.exit(code)
    if code:
        summary = folder / "summary.json"
        why = text[-2000:]
        if summary.exists():
            why = json.loads(summary.read_text())["exit_reason"]
        raise RunFailed(f"the {name} run ended with exit code {code}: {why}")


def launched(arguments: Sequence[str], output: Path) -> int:
    """Run ``oneloop launch``; see :data:`Start`."""
    try:
        with output.open("wb") as stream:
            return run_processes(arguments, module=_MODULE, seconds=SECONDS, output=stream.fileno())
    except TimeoutError:
        raise TimeoutError(f"did not end within {SECONDS:.0f} s") from None
    finally:  # run_processes() replaced the signal handlers
        on_stops(lambda *_: sys.exit(STOPPED))


class Forked:
    """Runs one process, on Linux a fork of a server that has done the slow imports.

    Args:
        timeout: Seconds after which a run counts as hung.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # The first optimizer that is built imports torch._dynamo, which takes seconds.
        self._context = server_context([_MODULE, "oneloop.tools.report.page", "torch._dynamo"])

    def __call__(self, arguments: Sequence[str], output: Path) -> int:
        """Run ``oneloop launch`` with one process; see :data:`Start`."""
        process = self._context.Process(target=_run_in_fork, args=(arguments, output))
        process.start()
        try:
            process.join(self._timeout)
            if process.is_alive():
                raise TimeoutError(f"did not end within {self._timeout:.0f} s")
            return int(process.exitcode)
        finally:
            process.kill()
            process.join()


def _run_in_fork(arguments: Sequence[str], output: Path) -> None:
    die_with(os.getppid())  # or the fork server, which ends with the process that started it
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)

    from oneloop.tools.prove import recorded_run

    options, training = split(arguments, ("mixed_precision",))
    os.environ["ACCELERATE_MIXED_PRECISION"] = options["mixed_precision"]
    recorded_run.main(training)
