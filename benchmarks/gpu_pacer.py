"""Loops in processes of their own, which another process times in turns.

A loop calls ``Pacer.step`` at the start of each optimizer step. The pacer runs the phases that the
other process asks for (warm up, time, trace, count waits). Between two phases the loop waits, with
the device's cache released, so that loops alternate without building and compiling a model again.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gpu_lines import FORK
from gpu_trace import events_of, reduce
from gpu_workloads import Workload

LOG_EVERY = 20  # steps; each loop reads its loss then. Timed phases are multiples of it
SKIPPED = 3  # steps after a pause that are not timed: the cache of the device fills again
FUNCTIONS = 40  # of a profile of the host


class Phase(NamedTuple):
    """What a loop does until it is paused again."""

    kind: str  # time, last (time, and no pause after it), trace, host or waits
    count: int  # steps
    variant: str = ""  # of the loop, if it has several


class Pacer:
    """Runs the phases that another process asks for, at the steps of a loop."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self.variant = ""  # that the present phase asks for
        self._connection = connection
        self._device = device
        self._began = time.perf_counter()
        self._phases = self._run()
        self._number: int | None = None  # of the present step
        # Frozen weights: they are in host memory while the loop is paused.
        self._frozen: list[nn.Parameter] = []
        self._copies: list[Tensor] = []

    def knows(self, model: nn.Module) -> None:
        """Take the frozen weights of the model out of the device's memory in pauses."""
        if not self._frozen:
            self._frozen = [one for one in model.parameters() if not one.requires_grad]

    def step(self, number: int | None = None) -> None:
        """Call it at the start of each step.

        Args:
            number: of the step; a second call with the same number has no effect.
        """
        if number is None or number != self._number:
            self._number = number
            next(self._phases)

    def _run(self) -> Iterator[None]:
        """Do what is asked, and yield when a step is to be made."""
        while True:
            phase: Phase = self._connection.recv()
            self.variant = phase.variant
            self._resume()
            if phase.kind in ("time", "last"):
                answer = yield from self._timed(phase.count)
            elif phase.kind == "trace":
                answer = yield from self._traced(phase.count)
            elif phase.kind == "host":
                answer = yield from self._profiled(phase.count)
            else:
                answer = yield from self._waited(phase.count)
            if phase.kind != "last":
                self._release()
            self._connection.send(answer)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _release(self) -> None:
        """Leave the device's memory to the other loop: the cache, and all frozen weights."""
        self._synchronize()
        on_gpu = self._device.type == "cuda"
        for parameter in self._frozen[len(self._copies) :]:  # once: they never change
            copy = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=on_gpu)
            self._copies.append(copy.copy_(parameter.data))
        for parameter, copy in zip(self._frozen, self._copies):
            parameter.data = copy
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _resume(self) -> None:
        for parameter, copy in zip(self._frozen, self._copies):
            parameter.data = copy.to(self._device, non_blocking=True)

    def _skip(self) -> Iterator[None]:
        for _ in range(SKIPPED):
            yield

    def _timed(self, count: int) -> Iterator[None]:
        """Time ``count`` steps."""
        yield from self._skip()
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(count):
            yield
        self._synchronize()
        over = time.perf_counter()
        answer = {"seconds": over - began, "since_start": over - self._began}
        if self._device.type == "cuda":
            answer["allocated"] = torch.cuda.max_memory_allocated()
            answer["reserved"] = torch.cuda.max_memory_reserved()
        return answer  # type: ignore[return-value]

    def _traced(self, count: int) -> Iterator[None]:
        """Reduce a trace of ``count`` steps."""
        yield from self._skip()
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds):  # the first profile of a process starts slowly
            yield
            self._synchronize()
        with profile(activities=kinds) as profiler:
            for _ in range(count):
                yield
            self._synchronize()
        full = reduce(events_of(profiler), steps=count)
        if self._device.type != "cuda":
            return full  # type: ignore[return-value]

        # Without the operations of the CPU, which slow down the host: when is the device idle?
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                yield
            self._synchronize()
        light = reduce(events_of(profiler), steps=count)
        gaps = "longest gaps of the device"
        tables = {**full.tables, gaps: light.tables[gaps]}
        return replace(full, idle_share=light.idle_share, tables=tables)  # type: ignore[return-value]

    def _profiled(self, count: int) -> Iterator[None]:
        """Return the functions in which the host spends its time."""
        yield from self._skip()
        self._synchronize()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            yield
        profiler.disable()
        self._synchronize()
        functions = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        rows = [
            {
                "ms per step": 1e3 * own / count,
                "with callees": 1e3 * whole / count,
                "calls per step": calls / count,
                "function": f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})",
            }
            for (file, line, name), (_, calls, own, whole, _) in functions.items()
        ]
        rows.sort(key=lambda row: -row["ms per step"])
        return rows[:FUNCTIONS]  # type: ignore[return-value]

    def _waited(self, count: int) -> Iterator[None]:
        """Count the warnings of torch about operations that wait for the device."""
        yield from self._skip()
        if self._device.type != "cuda":
            for _ in range(count):
                yield
            return {"waits": 0, "steps": count}  # type: ignore[return-value]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(count):
                yield
            torch.cuda.set_sync_debug_mode("default")
        messages = [str(one.message) for one in caught]
        waits = sum("called a synchronizing CUDA operation" in message for message in messages)
        return {"waits": waits, "steps": count}  # type: ignore[return-value]


@dataclass(frozen=True)
class Setting:
    """How a loop runs."""

    workload: Workload
    device: torch.device
    mixed_precision: str  # bf16 or no
    compiled: bool
    folder: Path
    kernels: Path  # folder of compiled kernels


Loop = Callable[[Setting, Pacer], None]


class Contender:
    """A loop in its own process, which is paused unless a phase runs."""

    def __init__(self, loop: Loop, setting: Setting) -> None:
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_contend, args=(loop, setting, theirs))
        self._process.start()
        theirs.close()

    def ask(
        self, kind: str, count: int, variant: str = "", *, patience: float | None = None
    ) -> Any:
        """Run a phase, and return its answer.

        Args:
            kind: of the phase.
            count: steps.
            variant: of the loop.
            patience: seconds to wait for the answer (None: as long as it takes).

        Raises:
            RuntimeError: the loop has failed, or took too long.
        """
        try:
            self._connection.send(Phase(kind, count, variant))
            if not self._connection.poll(patience):
                raise RuntimeError(f"no answer in {patience} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process of a loop ended with code {code}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """End the process, and wait until its memory is free."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()


def _contend(loop: Loop, setting: Setting, connection: Connection) -> None:
    setting.folder.mkdir(parents=True, exist_ok=True)
    # A loop finds only the compiled kernels that it is meant to find.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setting.kernels / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(setting.kernels / "triton")
    try:
        # After the fork: torch must see the device before the loop asks for it.
        pacer = Pacer(connection, setting.device)
        torch.manual_seed(0)
        loop(setting, pacer)
        connection.send("the loop ended by itself")
    except BaseException as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}"[:400])
    os._exit(1)
