"""``batch.micro auto``: try micro-batch sizes with the real job on all ranks before the run.

The result is cached.
"""

import hashlib
import json
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneloop.basics.files import replacing
from oneloop.basics.progress import Working
from oneloop.basics.untrusted import read_json
from oneloop.job.build import Job
from oneloop.job.trial_steps import Trial
from oneloop.launch.processes import Run
from oneloop.machine.micro_batch import Attempt, Child, is_outside_of_allocator, search
from oneloop.recipe.schema import Recipe

_RANK_VARS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "ACCELERATE_CPU_AFFINITY",
)
"""environment variables of launchers, which a process that trains alone must not see"""


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
    mode = str(recipe.batch.micro)
    _reject_notebook(recipe)
    share, rest = divmod(recipe.batch.size, run.ranks)
    if rest or not share:
        nearest = max(1, round(recipe.batch.size / run.ranks)) * run.ranks
        raise ValueError(
            f"batch.size {recipe.batch.size} cannot be split over {run.ranks} ranks; nearest: "
            f"{nearest}"
        )

    # Use the result of an earlier search.
    cache = _Cache(recipe, run)
    cached = run.from_main(cache.read())
    if cached is not None:
        run.display.say(
            f"batch.micro {mode}: {cached} (from an earlier search on this machine: {cache.file})"
        )
        return int(cached)

    environment = trial_environment(run)
    with Child(
        Trial(recipe),
        device=run.device,
        environment=environment,
        wait=partial(_on_all_ranks, run),
    ) as child:
        try:
            sizes = [micro for micro in range(1, share + 1) if share % micro == 0]
            best = search(sizes, partial(_attempt, run, child, mode), fastest=mode == "fastest")
        except MemoryError as error:
            raise ValueError(
                f"batch.micro {mode}: {error}; set machine.recompute full, shard the model "
                "(fsdp2.yaml), or make it smaller"
            ) from error
    if run.main:
        cache.write(best.micro)
    return best.micro


def trial_environment(run: Run) -> dict[str, str | None]:
    """Return the variables that differ in the trial process of this rank (None: removed).

    Collective: call on every rank.
    """
    # No agent has started the trial processes, so none holds a store for them: rank 0 must.
    environment: dict[str, str | None] = {"ONELOOP_EXIT_FILE": None}
    environment |= dict.fromkeys(name for name in os.environ if name.startswith("TORCHELASTIC_"))

    # Under FSDP2 they are connected, else each of them trains alone.
    if run.sharded:
        environment["MASTER_PORT"] = _port(run)
    else:
        environment |= dict.fromkeys(_RANK_VARS)
        if run.device.type == "cuda":
            environment["ACCELERATE_TORCH_DEVICE"] = str(run.device)
    return environment


def _attempt(run: Run, child: Child, mode: str, micro: int) -> Attempt:
    """Try a size on all ranks; return the time and the memory of the slowest and largest rank."""
    if run.sharded and child.closed:
        child.environment["MASTER_PORT"] = _port(run)
    fault: str | None = None
    try:
        with Working(f"trying micro-batch {micro}") as bar:
            tried = child.attempt(micro)
            bar.advance()
    except RuntimeError as error:
        tried = Attempt(micro, fits=False)
        fault = str(error)

    # All ranks raise the first error.
    faults = [reason for reason in run.gathered(fault) if reason]
    if faults:
        raise RuntimeError(faults[0])
    seconds, peak = run.largest(tried.seconds, tried.peak)
    result = "does not fit"
    if tried.fits:
        result = f"fits ({peak / 2**30:.2f} GiB, {1 / seconds:,.0f} samples/s on a process)"
    run.display.say(f"batch.micro {mode}: {micro} {result}")
    return Attempt(micro, tried.fits, seconds, int(peak))


def _reject_notebook(recipe: Recipe) -> None:
    if recipe.task.name.startswith("__main__."):
        raise ValueError(
            f"batch.micro {recipe.batch.micro} needs a second process, which cannot see a class of "
            "a notebook; put it into a file (my_task.py:MyTask), or give batch.micro a number"
        )


def _on_all_ranks(run: Run, answered: bool, failed: bool) -> tuple[bool, bool]:
    missing, any_failed = run.largest(float(not answered), float(failed))
    return not missing, bool(any_failed)


def _port(run: Run) -> str:
    port = None
    if run.main:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = str(probe.getsockname()[1])
    return str(run.from_main(port))


class _Cache:
    """Results of earlier searches by model and machine, in the user's cache folder."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.file = root / "oneloop" / "batch_size.json"
        resolved = recipe.resolved
        machine = dict(resolved["machine"])
        # These do not matter to memory and speed, or are known from the devices.
        for name in ("workers", "check_every", "gc_every", "device"):
            machine.pop(name, None)
        self.about = {
            "task": resolved["task"],
            "optimizer": resolved["optimizer"]["name"],
            "ema": resolved["ema"],
            "machine": machine,
            "share": recipe.batch.size // run.ranks,
            "asked": recipe.batch.micro,
            "sharded over": run.ranks if run.sharded else 1,
            "precision": run.accelerator.mixed_precision,
            "devices": sorted(set(run.gathered(_describe_device(run.device)))),
            "torch": torch.__version__,
        }
        text = json.dumps(self.about, sort_keys=True, default=str)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def _entries(self) -> dict[str, Any]:
        """Return the file's entries; none if it cannot be read, so that it is rewritten."""
        try:
            return dict(read_json(self.file))
        except (OSError, ValueError):
            return {}

    def read(self) -> int | None:
        try:
            return int(self._entries()[self.key]["micro"])
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, micro: int) -> None:
        """Store the result; ignore errors, because a run does not need the cache."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            known = self._entries()
            known[self.key] = {
                "micro": micro,
                "found": time.strftime("%Y-%m-%d %H:%M"),
                **self.about,
            }
            with replacing(self.file, shared=True) as draft:
                draft.write_text(json.dumps(known, indent=1, default=str))
        except (OSError, ValueError):
            return


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        return f"{about.name}, {about.total_memory} bytes"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{device.type}, {memory} bytes, {os.cpu_count()} cores"


def explained(job: Job, run: Run, error: BaseException) -> str:
    """Return the message for an out-of-memory error, with advice and sizes in GiB."""
    if run.device.type != "cpu" and is_outside_of_allocator(error):
        return (
            "out of memory, but not in the tensors of the model: if the memory of the host is "
            "short, use --machine.pinned false, fewer --machine.workers, or fewer processes on "
            "this host (ema.device cpu and machine.offload also keep tensors there); if another "
            f"program uses {run.device} (see nvidia-smi), end it"
        )
    each = job.layout.each
    gib = 2.0**30
    memory = sum(p.numel() * p.element_size() for p in job.model.parameters()) / gib

    # What would need less memory?
    advice = []
    if each > 1:
        smaller = max(micro for micro in range(1, each) if each % micro == 0)
        advice.append(
            f"--batch.micro {smaller} (now {each}; the result stays the same), or "
            "--batch.micro auto"
        )
    if job.recipe.machine.recompute == "none" and job.built.blocks:
        advice.append(
            "--machine.recompute full (activations are computed again: about a third more time)"
        )
    if run.device.type == "mps":
        advice.append("a smaller model: an Apple GPU trains with one process")
    elif not run.sharded:
        advice.append(
            "fsdp2.yaml (weights, gradients and optimizer, on this machine about "
            f"{4 * memory:.2f} GiB with AdamW, are divided among the processes)"
        )
    else:
        advice.append(
            f"more processes (each now holds {4 * memory:.2f} GiB of weights, gradients and "
            "optimizer)"
        )

    usage = ""
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.device)
        total = torch.cuda.get_device_properties(run.device).total_memory
        usage = f" (peak {peak / gib:.2f} of {total / gib:.2f} GiB)"
    elif run.device.type == "mps":
        usage = f" (of {torch.mps.recommended_max_memory() / gib:.2f} GiB)"
    choices = "; or ".join(advice)
    return f"out of memory on {run.device}{usage} with a micro-batch of {each}; {choices}"
