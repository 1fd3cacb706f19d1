"""A profiler trace of some steps, and a snapshot of the device's memory.

>>> with Profiling(folder, device, profile="10-15") as profiling:
...     for step in range(1, 100):
...         profiling.advance(step)                 # before the step's work
...         ...

``folder/trace.json.gz`` opens in https://ui.perfetto.dev or chrome://tracing, ``memory.pickle`` in
https://pytorch.org/memory_viz; ``operators.txt`` is a table.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
        self._recordings: list[_Recording] = []
        asked = (("watch.profile", profile, _trace), ("watch.memory", memory, _memory_history))
        for key, steps, record in asked:
            if steps:
                context = record(folder, device, say)
                self._recordings.append(_Recording(span(steps, key), context))

    def __enter__(self) -> "Profiling":
        return self

    def __exit__(self, *error: object) -> None:
        for recording in self._recordings:
            recording.running.close()

    def advance(self, number: int) -> None:
        """Start or stop recording before the step of this number."""
        for recording in self._recordings:
            first, last = recording.steps
            if number > last:
                recording.running.close()
            elif number >= first and not recording.begun:
                recording.begun = True
                recording.running.enter_context(recording.context)


class _Recording:
    """A context around a range of steps, from the first to the last one."""

    def __init__(self, steps: tuple[int, int], context: AbstractContextManager[None]) -> None:
        self.steps = steps
        self.context = context
        self.begun = False
        self.running = ExitStack()  # closed after the last step, or at the end of the run


@contextmanager
def _trace(folder: Path, device: torch.device, say: Callable[[str], object]) -> Iterator[None]:
    """Profile; then write the trace and the table of operators."""
    with torch_profile(record_shapes=True, profile_memory=True) as profiler:
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the trace should hold all kernels of the steps
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=30)
    (folder / "operators.txt").write_text(table)
    say(f"watch.profile: {folder}/trace.json.gz (ui.perfetto.dev) and operators.txt")


@contextmanager
def _memory_history(
    folder: Path, device: torch.device, say: Callable[[str], object]
) -> Iterator[None]:
    """Record what the GPU's memory is used for; then write the snapshot."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        yield
        say(f"watch.memory: {memory_snapshot(folder / 'memory.pickle')} (pytorch.org/memory_viz)")
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        yield
        say(
            "watch.memory: a snapshot needs a GPU; the peak of this process is "
            f"{peak_memory(device) / 2**30:.2f} GiB (watch.profile shows what operators allocate)"
        )


def memory_snapshot(file: Path) -> Path:
    """Write a snapshot of the GPU's memory, with the recorded history; return ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
