"""``batch.micro auto`` and ``fastest``: try micro-batch sizes with the real job before the run.

Each size trains some steps on the largest samples, in a new process beside each rank, which may run
out of memory. The result is cached.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from math import inf, isnan, nan
from typing import Any

import psutil
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from oneloop.basics.files import cache_folder, replacing
from oneloop.basics.memory import is_out_of_memory, peak_memory
from oneloop.basics.progress import Working
from oneloop.basics.system.processes import die_with
from oneloop.job.build import build_job
from oneloop.launch.processes import Run
from oneloop.machine.torch_settings import float32_products
from oneloop.recipe.schema import Recipe
from oneloop.run.entry import start_run
from oneloop.tools.plan.largest_samples import by_size
from oneloop.tools.plan.step_costs import StepCosts


def find_micro(recipe: Recipe, run: Run) -> int:
    """Find the micro-batch size for ``auto`` or ``fastest``. Collective: call on every rank.

    Args:
        recipe: the run.
        run: this process.

    Returns:
        The size.

    Raises:
        ValueError: batch.size does not divide over the ranks, or nothing fits.
    """
    mode = recipe.batch.micro
    if recipe.task.name.startswith("__main__."):
        raise ValueError(
            f"batch.micro {mode} needs a second process, which cannot see a class of "
            "a notebook; put it into a file (my_task.py:MyTask), or give batch.micro a number"
        )

    # A search takes long: find other errors before it.
    share = recipe.batch.size // run.ranks
    with run.setting_up():
        job = build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=1
        )
        largest = by_size(job)[:share]
        del job  # its model needs memory

    # Use the result of an earlier search.
    file = cache_folder() / "micro_batch" / _identity(recipe, run)
    text = run.from_main(file.read_text() if file.exists() else None)
    if text is not None:
        run.display.say(
            f"batch.micro {mode}: {text} (from an earlier search on this machine: {file})"
        )
        return int(text)

    sizes = [micro for micro in range(1, share + 1) if share % micro == 0]
    best = search(sizes, partial(_try_size, recipe, run, largest), fastest=mode == "fastest")

    # A run does not need the cache.
    if run.main:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, shared=True) as draft:
                draft.write_text(str(best))
    return best


def search(sizes: Sequence[int], seconds: Callable[[int], float], *, fastest: bool = False) -> int:
    """Return the largest micro-batch size that fits into memory.

    Args:
        sizes: the sizes to choose from, smallest first.
        seconds: tries a size, and returns the time per sample; infinity if it does not fit.
        fastest: also try all sizes below it, and return that with the least time per sample.

    Raises:
        ValueError: not even the smallest size fits.
    """
    seconds = cache(seconds)

    # Try the largest size first: if it fits, the search is over. Else halve the range.
    if not fastest and seconds(sizes[-1]) < inf:
        return sizes[-1]
    fitting = sizes[: bisect_left(sizes, inf, key=seconds)]
    if not fitting:
        raise ValueError(
            f"not even a micro-batch of {sizes[0]} fits into memory; set machine.recompute full, "
            "shard the model (fsdp2.yaml), or make it smaller"
        )
    return min(fitting, key=seconds) if fastest else fitting[-1]


def _try_size(recipe: Recipe, run: Run, largest: Sequence[int], micro: int) -> float:
    """Try a size on all ranks; return the seconds per sample of the slowest; inf: no memory."""
    # The trial processes connect at a separate port.
    port = run.from_main(get_free_port())
    context = multiprocessing.get_context("spawn")
    result = context.Array("d", 2)  # seconds per sample (0: not yet known), and peak memory
    process = context.Process(
        target=_try_steps, args=(os.getpid(), port, recipe, largest, micro, result)
    )

    # Wait until all of them have a result, or one lacks memory or has failed.
    with Working(f"trying micro-batch {micro}") as bar:
        process.start()
        waits, short, failed = True, False, False
        while waits and not short and not failed:
            time.sleep(0.05)
            code = process.exitcode
            killed = code == -signal.SIGKILL  # by the kernel, which lacks memory
            waits, short, failed = run.union(
                [
                    result[0] == 0,
                    result[0] == inf or killed,
                    isnan(result[0]) or (code is not None and not killed),
                ]
            )
        bar.advance()
    process.kill()
    process.join()
    if failed and not short:
        raise RuntimeError(f"a trial step with micro-batch {micro} failed: see the error above")

    # Report the time and the memory of the slowest and largest rank.
    seconds, peak = run.largest(result[0], result[1])
    text = "does not fit"
    if not short:
        text = f"fits ({peak / 2**30:.2f} GiB, {1 / seconds:,.0f} samples/s on a process)"
    run.display.say(f"batch.micro {recipe.batch.micro}: {micro} {text}")
    return inf if short else seconds


def _try_steps(
    parent: int, port: int, recipe: Recipe, largest: Sequence[int], micro: int, result: Any
) -> None:
    """Train some steps in this process; set the time to infinity if memory runs out."""
    die_with(parent)
    connect_at(port)
    try:
        # Set up the process as for the run.
        run = start_run(recipe, command=())
        machine = recipe.machine
        float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
        if run.device.type in ("cuda", "mps"):
            # Leave room for what a trial does not do. An Apple GPU would use disk space.
            torch.get_device_module(run.device).set_per_process_memory_fraction(0.95)

        job = build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=micro
        )
        costs = StepCosts(job, run, largest=largest, counted=False)
        result[:] = costs.seconds(), peak_memory(run.device)
    except BaseException as error:
        result[0] = inf if is_out_of_memory(error) else nan
        if not is_out_of_memory(error):
            traceback.print_exc()

    # Other processes may wait for this one: the run ends them all.
    signal.pause()


def connect_at(port: int) -> None:
    """Let trial processes connect with each other, and not with the run's processes or agent."""
    # No agent has started the trial processes, so none holds a store for them: rank 0 must.
    for name in [*os.environ]:
        if name.startswith("TORCHELASTIC_") or name == "ONELOOP_EXIT_FILE":
            del os.environ[name]
    os.environ["MASTER_PORT"] = str(port)


def _identity(recipe: Recipe, run: Run) -> str:
    """Return a hash of what the result of a search depends on: the model and the machine."""
    memory = psutil.virtual_memory().total
    name = run.device.type
    if name == "cuda":
        device = torch.cuda.get_device_properties(run.device)
        memory = device.total_memory
        name = device.name
    about = {
        "keys": [recipe.resolved[group] for group in ("task", "batch", "ema", "machine")],
        "optimizer": recipe.optimizer.name,
        "layout": [run.ranks, run.sharded, run.accelerator.mixed_precision],
        "devices": run.gathered([name, memory]),
        "torch": torch.__version__,
    }
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
