"""Real processes for tests, forked from a warm server, so that two processes start in about two
seconds.

A world runs a function in each of its processes, with the environment variables of ``accelerate
launch``.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import forked_writer
from suite_costs import SPENT, STARTED
from world_server import Forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIGS = ROOT / "accelerate_configs"

# Processes that a test starts find the helpers, and the test files by their names. The server takes
# its path from here, too (Python 3.11 has no other way).
FOLDERS = sorted({str(file.parent) for file in HERE.parent.glob("*/*.py")})
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Each worker of the suite has its own ports, and takes them in turn.
FIRST_PORT, PORTS_PER_WORKER, PORTS_OF_WORKERS = 12_000, 600, 32
_ports = itertools.count(os.getpid())


@dataclass
class World:
    """Results of a world: exit codes, return values and output of its processes, by rank."""

    codes: list[int | None]
    results: list[Any]
    output: str

    def ok(self) -> list[Any]:
        assert self.codes == [0] * len(self.codes), f"exit codes {self.codes}\n{self.output}"
        return self.results


def environment(config: str, *options: str) -> dict[str, str]:
    """Return the variables that ``accelerate launch --config_file
    accelerate_configs/<config>.yaml`` sets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    words = ["--config_file", str(CONFIGS / f"{config}.yaml"), *options, "-m", "oneloop.train"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    made = (
        prepare_multi_gpu_env(args)
        if args.multi_gpu or args.use_fsdp
        else prepare_simple_launcher_cmd_env(args)[1]
    )
    return {k: v for k, v in made.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    config: str | None = None,
    options: Sequence[str] = (),
    variables: dict[str, str] | None = None,
    timeout: float = 240.0,
    folder: Path | None = None,
    watch: bool | None = None,
) -> World:
    """Run ``function(*args)`` in ``ranks`` processes and wait for them.

    Args:
        watch: give each process a supervisor, as on a command line; None: for :func:`train`, if the
            variable ONELOOP_TESTS_WATCHED is set (which adds two minutes to the whole suite).
    """
    watch = (
        (function is train and "ONELOOP_TESTS_WATCHED" in os.environ) if watch is None else watch
    )
    # The writing process is forked, too, unless a test is about it, or about all children.
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    forks = not any(place in test for place in ("tests/checkpoint/", "tests/run/test_fit.py"))
    config = config or ("single" if ranks == 1 else "ddp")
    shared = environment(config, *options) | (variables or {})
    STARTED["worlds"] += 1
    STARTED["ranks"] += ranks
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        port = free_port()
        for rank in range(ranks):
            mine = dict(shared)
            if ranks > 1:
                mine |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                }
            given = (function, args, mine, scratch, rank, ranks, str(folder or ""), watch, forks)
            processes.append(Forked(_child, given))
        for process in processes:
            process.join(timeout)
        late = [process for process in processes if process.exitcode is None]
        for process in late:
            process.kill()
        SPENT["worlds"] += sum(process.cpu_seconds for process in processes)
        output = "".join(
            f"--- rank {rank}\n{Path(scratch, f'{rank}.txt').read_text()}"
            for rank in range(ranks)
            if Path(scratch, f"{rank}.txt").exists()
        )
        assert not late, f"{len(late)} of {ranks} processes hung\n{output}"
        results = [
            pickle.loads(path.read_bytes())
            if (path := Path(scratch, f"{rank}.pickle")).exists()
            else None
            for rank in range(ranks)
        ]
        return World([process.exitcode for process in processes], results, output)


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: dict[str, str],
    scratch: str,
    rank: int,
    ranks: int,
    folder: str,
    watch: bool,
    forks: bool,
) -> None:
    os.environ.update(env)
    # its child processes do not use the forkserver
    multiprocessing.set_start_method("fork", force=True)
    if folder:
        os.chdir(folder)
    # a suite in the background ignores SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(Path(scratch, f"{rank}.txt"), os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if watch:  # before torch has threads, as on a command line
        from oneloop.launch.before_imports import supervised

        supervised()
    if forks:
        forked_writer.prepare()

    torch.set_num_threads(1)
    code = 0
    try:
        result = function(*args)
        Path(scratch, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    Path(scratch, f"{rank}.ended").touch()
    if rank == 0 and code == 0:
        _wait_for_others(Path(scratch), ranks)
    os._exit(code)


def _wait_for_others(scratch: Path, ranks: int, seconds: float = 10.0) -> None:
    """Wait until the other ranks have ended: rank 0 serves the store that they may still read."""
    end = time.monotonic() + seconds
    others = {f"{rank}.ended" for rank in range(1, ranks)}
    while time.monotonic() < end and not others <= set(os.listdir(scratch)):
        time.sleep(0.01)


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """Return a metrics line without times and memory: the values that depend on the recipe only."""
    timed = ("time", "train/samples_per_second", "speed/", "share/", "memory/", "device/")
    return {name: value for name, value in line.items() if not name.startswith(timed)}


def timeless_log(folder: Path, *, saves: bool = False) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are equal in each repetition of a run.

    A start adds a line, and so does a rank that another program slows down.

    Args:
        folder: the run folder.
        saves: keep the lines of saves.
    """
    others = {"resume", "straggler"} | (set() if saves else {"save"})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines if line.get("event") not in others]


def train(argv: Sequence[str]) -> None:
    """Run ``python -m oneloop.train`` with these words."""
    from oneloop.launch import before_imports
    from oneloop.train import main

    before_imports.report(argv)
    main(list(argv))


def each_message(several: list[list[str]]) -> list[tuple[Any, str]]:
    """Return exit code and output of each of these commands."""
    import contextlib
    import io

    found = []
    for given in several:
        output = io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                train(given)
            except SystemExit as end:
                code = end.code
        found.append((code, output.getvalue()))
    return found


@dataclass
class Ended:
    """A command that has ended: its exit code, its output, and the files that came or went."""

    code: int
    output: str
    changed: set[Path]


def each_forked(commands: list[tuple[Path, list[str]]]) -> list[Ended]:
    """Run the words of each command in its folder, in a process of its own.

    The processes are forked from this one, which imports and changes nothing: no command finds the
    modules or the environment of another.
    """
    return [_forked(folder, words) for folder, words in commands]


def _forked(folder: Path, words: list[str]) -> Ended:
    before = _files(folder)
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                signal.alarm(100)  # ends a command that hangs
                os.chdir(folder)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                here(words)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
        output.seek(0)
        text = output.read()
    return Ended(os.waitstatus_to_exitcode(status), text, before ^ _files(folder))


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def fresh(argv: Sequence[str]) -> None:
    """As :func:`train`, with numpy and Python seeded by the system, as in a new interpreter."""
    import numpy as np

    random.seed()
    np.random.seed()
    train(argv)


def free_port() -> int:
    """Return a port that no program uses, and that no other worker of the suite will choose.

    The ports are below the ephemeral range, from which the system takes those of connections.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % PORTS_OF_WORKERS
    first = FIRST_PORT + worker * PORTS_PER_WORKER
    for _ in range(PORTS_PER_WORKER):
        port = first + next(_ports) % PORTS_PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"no port is free from {first} on")


def forget_bitsandbytes() -> None:
    """Hide that the server of the worlds has imported bitsandbytes: accelerate would not fork."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        del sys.modules[module]


def here(words: list[str]) -> None:
    """Run ``python -m oneloop.train``, ``oneloop evaluate`` or ``oneloop predict`` in the current
    folder."""
    sys.path.insert(0, "")
    (apply if words[:1] in (["evaluate"], ["predict"]) else train)(words)


def apply(words: list[str]) -> None:
    from oneloop.tools.after_training.evaluate_and_predict import main

    main(words)


def after(folder: Path, *words: str, config: str = "single", ranks: int = 1):
    return run(
        apply,
        list(words),
        ranks=ranks,
        config=config,
        folder=folder,
        variables={"OMP_NUM_THREADS": "1"},
    )


def back_to(folder: Path, step: int) -> None:
    """Turn a finished run into one that was killed after ``step``."""
    from oneloop.checkpoint.store import Store

    shutil.rmtree(folder / "final")
    (folder / "summary.json").unlink()
    for path in Store(folder / "checkpoints").sealed():
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
