"""What to change after memory ran out."""

import sys
from pathlib import Path

import torch

from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.measure.profiling import memory_snapshot

_GIB = 2.0**30


def explained(job: Job, run: Run, folder: Path, error: BaseException) -> str:
    """Return the message for an out-of-memory error, with advice and sizes in GiB.

    Write a snapshot of a GPU's memory into the run folder, if rank 0 has begun the run.

    Args:
        job: of the run.
        run: this process.
        folder: the run folder, which may not exist yet.
        error: the error that ended the run.
    """
    if run.device.type == "cuda" and folder.is_dir():
        snapshot = memory_snapshot(folder / "profile" / f"out-of-memory-{run.rank}.pickle")
        print(
            f"oneloop: {snapshot} shows which tensors use the memory (pytorch.org/memory_viz)",
            file=sys.stderr,
        )

    # Memory of the host, also pinned memory, or a part of the GPU's that CUDA itself needs. For its
    # tensors on a GPU, torch raises OutOfMemoryError with other words.
    outside = isinstance(error, MemoryError) or any(
        words in str(error) for words in ("CUDA error: out of memory", "can't allocate memory")
    )
    if run.device.type != "cpu" and outside:
        return (
            "out of memory, but not in the tensors of the model: if the memory of the host is "
            "short, use --machine.pinned false, fewer --machine.workers, or fewer processes on "
            "this host (ema.device cpu and machine.offload also keep tensors there); if another "
            f"program uses {run.device} (see nvidia-smi), end it"
        )

    # What would need less memory?
    each = job.layout.each
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
    memory = 4 * sum(p.numel() * p.element_size() for p in job.model.parameters()) / _GIB
    state = f"{memory:.2f} GiB of weights, gradients and optimizer, with AdamW"
    if run.device.type == "mps":
        advice.append("a smaller model: an Apple GPU trains with one process")
    elif run.sharded:
        advice.append(f"more processes (each now holds about {state})")
    else:
        advice.append(f"fsdp2.yaml (about {state}, are divided among the processes)")

    usage = ""
    if run.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.device)
        total = torch.cuda.get_device_properties(run.device).total_memory
        usage = f" (peak {peak / _GIB:.2f} of {total / _GIB:.2f} GiB)"
    choices = "; or ".join(advice)
    return f"out of memory on {run.device}{usage} with a micro-batch of {each}; {choices}"
