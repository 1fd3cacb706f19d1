"""The lines of ``gpu_day.py``: a line is one check or one measurement, in a process of its own.

A module registers its lines, the most valuable first:

>>> @line("check", seconds=20, numbers=["error"])
... def fused_adamw(place: Place) -> Result:
...     return Result(f"within {error:.1e}", {"error": error})
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

PARTS = ("check", "speed", "bits", "plan", "faults")
LOG_LINES = 60  # of a line's output, kept in the record of a failure

# Children are forked from a process that has imported all libraries and has not touched CUDA.
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Place:
    """Where a line runs."""

    folder: Path  # empty, deleted afterwards
    toy: bool  # small shapes on a CPU
    rates: dict[str, float]  # what the line speed/card measured on this card, if it ran
    until: float = math.inf  # when the line is ended, on the clock of time.monotonic

    @property
    def device(self) -> torch.device:
        """The device; a process that asks for it uses CUDA."""
        return torch.device("cpu") if self.toy else torch.device("cuda", 0)

    @property
    def precision(self) -> str:
        """Mixed precision of accelerate: bf16 on a GPU; none in a toy, which a CPU would slow."""
        return "no" if self.toy else "bf16"


@dataclass(frozen=True)
class Result:
    """What a line found."""

    says: str  # one sentence
    numbers: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # rows by title


@dataclass(frozen=True)
class Line:
    """A named check or measurement."""

    part: str
    name: str
    run: Callable[[Place], Result]
    seconds: float  # expected on an H100
    numbers: Sequence[str]  # that its result must have
    on_gpu: Sequence[str]  # more of them, which only a GPU gives
    gpus: int  # GPUs that it needs; 0: a toy runs it on a CPU
    packages: Sequence[str]  # that it imports, and that may be missing
    gpu_packages: Sequence[str] = ()  # more of them, which only a GPU needs
    alone: bool = False  # it measures time, or fills the memory: no other line may run beside it

    def why_skipped(self, gpus: int) -> str | None:
        """Return why the line cannot run on a machine with this many GPUs; None if it can."""
        if self.gpus > gpus:
            return "no CUDA" if not gpus else f"one GPU only; it needs {self.gpus}"
        for package in (*self.packages, *(self.gpu_packages if gpus else ())):
            if importlib.util.find_spec(package) is None:
                return f"package missing: {package}"
        return None

    def missing(self, numbers: dict[str, float], *, toy: bool) -> list[str]:
        """Return the names of numbers that a result lacks, or that are not finite."""
        needed = [*self.numbers, *(() if toy else self.on_gpu)]
        return [name for name in needed if not math.isfinite(numbers.get(name, math.nan))]


# What pip installs for a package that may be missing; others have their own name.
REQUIREMENTS = {
    "datasets": ("datasets", "dill", "multiprocess"),
    "liger_kernel": ("liger-kernel",),
}


def requirements(lines: Sequence[Line]) -> list[str]:
    """Return what pip must install for lines, as names of packages without their dependencies."""
    found = set[str]()
    for one in lines:
        for package in (*one.packages, *one.gpu_packages):
            found.update(REQUIREMENTS.get(package, (package,)))
    return sorted(found)


LINES: list[Line] = []


def line(
    part: str,
    *,
    seconds: float,
    numbers: Sequence[str] = (),
    on_gpu: Sequence[str] = (),
    gpus: int = 0,
    packages: Sequence[str] = (),
    gpu_packages: Sequence[str] = (),
    alone: bool = False,
    name: str = "",
) -> Callable[[Callable[[Place], Result]], Callable[[Place], Result]]:
    """Register a function as a line of ``part``; its name is that of the function by default."""

    def register(function: Callable[[Place], Result]) -> Callable[[Place], Result]:
        title = name or function.__name__
        made = Line(
            part=part,
            name=title,
            run=function,
            seconds=seconds,
            numbers=numbers,
            on_gpu=on_gpu,
            gpus=gpus,
            packages=packages,
            gpu_packages=gpu_packages,
            alone=alone or part == "speed",
        )
        assert part in PARTS
        assert (part, title) not in {(one.part, one.name) for one in LINES}
        LINES.append(made)
        return function

    return register


@dataclass
class Outcome:
    """How a line ended, as it is recorded."""

    part: str
    name: str
    outcome: str  # pass, fail or skipped
    says: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # the end of the output, if it failed
    when: str = ""
    card: str = ""  # device that gave the numbers

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value not in ({}, [], "")}


class Running:
    """A line in a child process, which has at most ``limit`` seconds.

    Args:
        chosen: the line.
        toy: small shapes on a CPU.
        rates: what the line speed/card has measured.
        limit: seconds after which the line is ended.
    """

    def __init__(self, chosen: Line, *, toy: bool, rates: dict[str, float], limit: float) -> None:
        self.line = chosen
        self._toy = toy
        self._limit = limit
        self._folder = Path(tempfile.mkdtemp(prefix=f"gpu-{chosen.name}-"))
        self._log = self._folder.with_suffix(".log")
        self.answers, theirs = FORK.Pipe(duplex=False)
        self.until = time.monotonic() + limit
        place = Place(self._folder, toy, rates, self.until)
        self._child = FORK.Process(target=_child, args=(chosen, place, theirs, self._log))
        self._began = time.perf_counter()
        self._child.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """Wait for the end of the line, end all that it has started, and return its outcome."""
        outcome = "fail"
        try:
            if self.answers.poll(max(0.0, self.until - time.monotonic())):
                outcome, result = self.answers.recv()
            else:
                result = Result(
                    f"it took longer than the {self._limit:.0f} s that were left for it"
                )
        except EOFError:
            self._child.join(5)
            code = self._child.exitcode
            result = Result(f"its process ended with code {code} and no result")
        finally:
            # The child leads a process group: what it has started ends with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.join()
            self.answers.close()
        output = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.unlink(missing_ok=True)

        # A line without its number is a failure.
        lacking = self.line.missing(result.numbers, toy=self._toy)
        if outcome == "pass" and lacking:
            outcome = "fail"
            says = f"without its numbers {', '.join(lacking)}: {result.says}"
            result = Result(says, result.numbers, result.tables)
        return Outcome(
            part=self.line.part,
            name=self.line.name,
            outcome=outcome,
            says=result.says,
            seconds=round(time.perf_counter() - self._began, 1),
            numbers=result.numbers,
            tables=result.tables,
            log=output[-LOG_LINES:] if outcome == "fail" else [],
        )


def _child(chosen: Line, place: Place, answers: Connection, log: Path) -> None:
    os.setsid()
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if place.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(place.folder)
    try:
        answers.send(("pass", chosen.run(place)))
    except BaseException as error:
        traceback.print_exc()
        answers.send(("fail", Result(_first_words(error))))
    sys.stdout.flush()
    sys.stderr.flush()
    answers.close()
    os._exit(0)


def _first_words(error: BaseException) -> str:
    """Return an error as at most 400 characters."""
    return f"{type(error).__name__}: {error}"[:400]
