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

    Args:
        folder: Output folder, created when there is something to write.
        device: Device to profile in addition to the host.
        profile: Steps of the trace, ``10-15`` or ``10``, counted from 1.
        memory: Steps of the memory snapshot; without a GPU, only the peak is printed.
        say: Prints a message for the user.
        log: Gets the share of exposed communication, as a metric.
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
        self._folder = folder
        self._device = device
        self._say = say
        self._log = log
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
        if self._trace is not None:
            first, last = self._trace
            if self._profiler is None and first <= number <= last:
                self._start_trace()
            elif number > last:
                self._stop_trace()
        if self._memory is not None:
            first, last = self._memory
            if not self._recording and first <= number <= last:
                self._recording = True
                if self._device.type == "cuda":
                    torch.cuda.memory._record_memory_history(max_entries=200_000)
            elif number > last:
                self._stop_memory()

    def _start_trace(self) -> None:
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=kinds, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def _stop_trace(self) -> None:
        if self._profiler is None:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # the trace should hold all kernels of the steps
        self._profiler.stop()

        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / "trace.json.gz"))
        by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=by, row_limit=30)

        # With several ranks, say what the communication costs.
        alone, whole = exposed(self._profiler.events() or ())
        if whole and dist.is_initialized():
            percent = f"{100 * alone / whole:.1f} %"
            table = f"communication that nothing else overlaps: {percent} of the span\n{table}"
            self._log({"profile/exposed_communication": alone / whole})
        (self._folder / "operators.txt").write_text(table)
        self._say(
            f"watch.profile: {self._folder}/trace.json.gz (ui.perfetto.dev) and operators.txt"
        )
        self._profiler = None
        self._trace = None

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
            peak = peak_memory(self._device) / 2**30
            self._say(
                "watch.memory: a snapshot needs a GPU; the peak of this process is "
                f"{peak:.2f} GiB (watch.profile shows what operators allocate)"
            )
        self._recording = False
        self._memory = None


def memory_snapshot(file: Path) -> Path:
    """Write a snapshot of the GPU's memory, with the recorded history; return ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file


def exposed(events: Iterable[Any]) -> tuple[float, float]:
    """Return the microseconds of communication without computation, and of the whole span.

    On a GPU this compares kernels; without one, host threads, since gloo runs on separate threads.

    Args:
        events: Those of a profiler.
    """
    # A GPU also has the ranges of record_function, such as FSDP2's, which are no kernels.
    found = list(events)
    kernels = []
    for event in found:
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            kernels.append(event)
    compared = kernels or found
    if not compared:
        return 0.0, 0.0

    spans = []
    sending = []
    computing = []
    for event in compared:
        one = (event.time_range.start, event.time_range.end)
        spans.append(one)
        if _sends(event.name):
            sending.append(one)
        # On the host, an operator that calls others would count twice.
        elif kernels or (event.name.startswith("aten::") and not event.cpu_children):
            computing.append(one)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return covered(chain(sending, computing)) - covered(computing), float(whole)


def _sends(name: str) -> bool:
    return any(word in name for word in _SENDING)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of these spans."""
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
