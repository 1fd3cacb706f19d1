"""A profiler trace of some steps, and a snapshot of the device's memory.

>>> with Profiling(folder, device, profile="10-15") as profiling:
...     for step in range(1, 100):
...         profiling.advance(step)                 # before the step's work
...         ...

``folder/trace.json.gz`` opens in https://ui.perfetto.dev or chrome://tracing, ``memory.pickle`` in
https://pytorch.org/memory_viz; ``operators.txt`` is a table.
"""

from collections.abc import Callable, Generator
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path

import torch
from torch.profiler import profile as torch_profile

from oneloop.basics.duration import span
from oneloop.basics.memory import peak_memory


class Profiling:
    """Profiles a range of steps on this process.

    Args:
        folder: Output folder, created when there is something to write.
        device: Device to profile in addition to the host.
        profile: Steps of the trace, ``10-15`` or ``10``, counted from 1.
        memory: Steps of the memory snapshot; without a GPU, only the peak is printed.
        say: Prints a message for the user.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        profile: str | None = None,
        memory: str | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        # Each recording goes on at its first step, and is closed after its last one.
        self._recordings: list[tuple[tuple[int, int], Generator[None]]] = []
        if profile:
            self._recordings.append((span(profile, "watch.profile"), _trace(folder, device, say)))
        if memory:
            history = _memory_history(folder, device, say)
            self._recordings.append((span(memory, "watch.memory"), history))

    def __enter__(self) -> "Profiling":
        return self

    def __exit__(self, *error: object) -> None:
        for _, recording in self._recordings:
            recording.close()

    def advance(self, number: int) -> None:
        """Start or stop recording before the step of this number."""
        for (first, last), recording in self._recordings:
            if number > last:
                recording.close()
            elif number >= first and getgeneratorstate(recording) == GEN_CREATED:
                next(recording)


def _trace(folder: Path, device: torch.device, say: Callable[[str], object]) -> Generator[None]:
    """Profile; when closed, write the trace and the table of operators."""
    profiler = torch_profile(record_shapes=True, profile_memory=True)
    profiler.start()
    try:
        yield
    finally:
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the trace should hold all kernels of the steps
        profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=30)
        (folder / "operators.txt").write_text(table)
        say(f"watch.profile: {folder}/trace.json.gz (ui.perfetto.dev) and operators.txt")


def _memory_history(
    folder: Path, device: torch.device, say: Callable[[str], object]
) -> Generator[None]:
    """Record what the GPU's memory is used for; when closed, write the snapshot."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        if on_gpu:
            snapshot = memory_snapshot(folder / "memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
            say(f"watch.memory: {snapshot} (pytorch.org/memory_viz)")
        else:
            say(
                "watch.memory: a snapshot needs a GPU; the peak of this process is "
                f"{peak_memory(device) / 2**30:.2f} GiB (watch.profile shows what operators "
                "allocate)"
            )


def memory_snapshot(file: Path) -> Path:
    """Write a snapshot of the GPU's memory, with the recorded history; return ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
