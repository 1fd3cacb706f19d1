"""A short real run in a separate process, which may crash, hang or run out of memory."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from oneloop.basics.system.processes import die_with
from oneloop.tools.run_reader import read_record
from oneloop.tools.server_context import server_context
from oneloop.tools.worth.techniques import PRECISION, Machine, as_arguments


@dataclass(frozen=True)
class Measured:
    """Result of a short run."""

    rate: float = 0.0  # samples per second, after the warm-up steps
    # peak memory of the process in MiB: of the device, or of the host if there is no device
    peak: float = 0.0
    fault: str = ""  # why there is no result; empty: it succeeded
    machine: Machine | None = None  # where it ran
    weights: Mapping[str, Tensor] | None = None  # final weights, if requested


class Runner:
    """Starts short runs, one at a time; on Linux from a server that has done the slow imports.

    Args:
        recipe: Recipe and keys.
        timeout: Seconds after which a run counts as hung.
    """

    def __init__(self, recipe: Sequence[str], *, timeout: float) -> None:
        self._recipe = list(recipe)
        self._timeout = timeout
        # The first optimizer that is built imports torch._dynamo, which takes seconds.
        self._context = server_context(
            ["oneloop.tools.worth.short_run", "oneloop.train", "torch._dynamo"]
        )

    def __call__(
        self, keys: Mapping[str, Any], *, steps: int, warm: int, weights: bool = False
    ) -> Measured:
        """Train a few steps.

        Args:
            keys: Keys of the recipe; with them, the precision.
            steps: Number of steps.
            warm: Number of first steps that are not timed.
            weights: Also return the final weights.
        """
        with tempfile.TemporaryDirectory(prefix="oneloop-") as scratch:
            common = {
                "duration": steps,
                "eval.every": 0,
                "stop.patience": 0,
                "save.every": 0,
                "save.best": False,
                "track": "none",
                "run.dir": f"{scratch}/run",
                "watch.output": "quiet",
                "save.mirror": None,
            }

            # Start the run in a process of its own.
            arguments = [*self._recipe, *as_arguments({**common, **keys})]
            pipe, sender = self._context.Pipe()
            precision = str(keys.get(PRECISION, "no"))
            process = self._context.Process(
                target=_serve, args=(sender, arguments, precision, warm, scratch)
            )
            process.start()
            sender.close()  # else a crash would not end the pipe

            # Wait for its result; a crash closes the pipe without one.
            with _terminated(process):
                try:
                    if pipe.poll(self._timeout):
                        answer: Measured = pipe.recv()
                    else:
                        answer = Measured(fault=f"did not end within {self._timeout:.0f} s")
                except EOFError:
                    process.join()
                    answer = Measured(fault=f"the process exited with code {process.exitcode}")
            if weights and not answer.fault:
                file = Path(scratch) / "run" / "final" / "model.safetensors"
                answer = replace(answer, weights=load_file(file))
            return answer


@contextmanager
def _terminated(process: Any) -> Iterator[None]:
    try:
        yield
    finally:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, arguments: list[str], precision: str, warm: int, scratch: str) -> None:
    die_with(os.getppid())  # or the fork server, which ends with the process that started it
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    output = os.open(Path(scratch) / "output.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    try:
        pipe.send(_train(arguments, warm))
    except BaseException as error:
        from oneloop.basics.memory import is_out_of_memory

        last = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        pipe.send(Measured(fault="out of memory" if is_out_of_memory(error) else last))
    pipe.close()


def _train(arguments: list[str], warm: int) -> Measured:
    from torch import nn

    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read
    from oneloop.run.folder import Folder
    from oneloop.train import train

    recipe = read(arguments)
    run = start(device=recipe.machine.device)
    job = build_job(recipe, ranks=1, device=run.device.type)
    machine = Machine(
        device=run.device.type,
        cores=run.cores,
        blocks=bool(job.built.blocks),
        convolutions=any(isinstance(module, nn.Conv2d) for module in job.model.modules()),
    )

    # Note the time before each update.
    times: list[float] = []
    make = job.make_optimizer

    def timed(model: nn.Module) -> Any:
        optimizer = make(model)
        optimizer.register_step_pre_hook(lambda *_: times.append(time.perf_counter()))
        return optimizer

    folder = Folder(recipe.folder)
    run.command = ["oneloop.train", *arguments]
    with run.display, run.closing:
        train(replace(job, eval_sets={}, make_optimizer=timed), run, folder)

    peaks = read_record(folder.path).curve("memory/peak_gib")[1]
    timed_steps = len(times) - 1 - warm
    rate = 0.0
    if timed_steps > 0:
        rate = recipe.batch.size * timed_steps / (times[-1] - times[warm])
    return Measured(rate, peak=1024 * max(peaks), machine=machine)
