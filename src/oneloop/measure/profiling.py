"""A profiler trace of some steps, and a snapshot of the device's memory.

>>> with Profiling(folder, device, profile="10-15") as profiling:
...     for step in range(1, 100):
...         profiling.step(step)                    # before the step's work
...         ...

``folder/trace.json.gz`` opens in https://ui.perfetto.dev or chrome://tracing, ``memory.pickle`` in
https://pytorch.org/memory_viz; ``operators.txt`` is a table.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from oneloop.basics.duration import span
from oneloop.basics.memory import peak_memory

_SENDING = ("nccl", "gloo:", "c10d::", "record_param_comms")


class Profiling:
    """Profiles a range of steps on this process.

    Args: ``folder``: output folder, created when there is something to write. ``device``: device to
    profile in addition to the host. ``profile``: steps of the trace, ``10-15`` or ``10``, counted
    from 1. ``memory``: steps of the memory snapshot; without a GPU, only the peak is printed.
    ``say``: prints a message for the user. ``log``: gets the share of exposed communication, as a
    metric.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        profile: str | None = None,
        memory: str | None = None,
        say: Callable[[str], object] = print,
        log: Callable[[dict[str, float]], object] = dict,
    ) -> None:
        self._folder, self._device, self._say, self._log = folder, device, say, log
        self._trace = span(profile, "watch.profile") if profile else None
        self._memory = span(memory, "watch.memory") if memory else None
        self._profiler: Any = None
        self._recording = False

    def __enter__(self) -> "Profiling":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._stop_trace()
        self._stop_memory()

    def step(self, number: int) -> None:
        """Start or stop recording before the step of this number."""
        if self._trace and self._profiler is None and self._trace[0] <= number <= self._trace[1]:
            kinds = [
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if self._device.type == "cuda" else []),
            ]
            self._profiler = profile(activities=kinds, record_shapes=True, profile_memory=True)
            self._profiler.start()
        elif self._trace and number > self._trace[1]:
            self._stop_trace()
        if self._memory and not self._recording and self._memory[0] <= number <= self._memory[1]:
            self._recording = True
            if self._device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        elif self._memory and number > self._memory[1]:
            self._stop_memory()

    def _stop_trace(self) -> None:
        if self._profiler is None:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / "trace.json.gz"))
        by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=by, row_limit=30)
        alone, whole = exposed(self._profiler.events() or ())
        if whole and dist.is_initialized():
            table = (
                f"communication that nothing else overlaps: {100 * alone / whole:.1f} % of the "
                f"span\n{table}"
            )
            self._log({"profile/exposed_communication": alone / whole})
        (self._folder / "operators.txt").write_text(table)
        self._say(
            f"watch.profile: {self._folder}/trace.json.gz (ui.perfetto.dev) and operators.txt"
        )
        self._profiler, self._trace = None, None

    def _stop_memory(self) -> None:
        if not self._recording:
            return
        if self._device.type == "cuda":
            self._say(
                f"watch.memory: {memory_snapshot(self._folder / 'memory.pickle')} "
                "(pytorch.org/memory_viz)"
            )
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            peak = f"the peak of this process is {peak_memory() / 2**30:.2f} GiB"
            self._say(
                f"watch.memory: a snapshot needs a GPU; {peak} (watch.profile shows what "
                "operators allocate)"
            )
        self._recording, self._memory = False, None


def memory_snapshot(file: Path) -> Path:
    """Write a snapshot of the GPU's memory, with the history of allocations if it was recorded;
    return ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file


def exposed(events: Iterable[Any]) -> tuple[float, float]:
    """Return the microseconds of communication without computation, and of the whole span, from
    profiler events.

    On a GPU this compares kernels; without one, host threads, since gloo runs on separate
    threads."""
    found = list(events)
    kernels = [event for event in found if str(event.device_type).endswith("CUDA")]
    compared = kernels or found
    sending = [(e.time_range.start, e.time_range.end) for e in compared if _sends(e.name)]
    computing = [
        (e.time_range.start, e.time_range.end)
        for e in compared
        if not _sends(e.name) and (kernels or (e.name.startswith("aten::") and not e.cpu_children))
    ]
    if not compared:
        return 0.0, 0.0
    whole = max(e.time_range.end for e in compared) - min(e.time_range.start for e in compared)
    return covered(chain(sending, computing)) - covered(computing), float(whole)


def _sends(name: str) -> bool:
    return any(word in name for word in _SENDING)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of these spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
