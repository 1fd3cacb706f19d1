"""Find the largest micro-batch that fits, by real steps in a child process.

The child may run out of memory.

>>> def steps():                                     # in the child: builds the model once
...     model = ...
...     return lambda micro: train_two_steps(model, micro)
>>> with Child(steps) as child:
...     found = search([1, 2, 4, 8, 16], child.attempt)

This changes only how many samples go through the model at once; the global batch, and so the
training, is the same.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from oneloop.basics.memory import is_out_of_memory, peak_memory
from oneloop.basics.system.processes import die_with

Steps = Callable[[int], object]  # runs complete training steps with a micro-batch of this size


@dataclass(frozen=True)
class Attempt:
    """Result of trying one micro-batch size."""

    micro: int
    fits: bool
    seconds: float = 0.0  # per sample, if it fits
    peak: int = 0  # peak memory in bytes, of the device or else of the host


def search(
    candidates: Sequence[int], attempt: Callable[[int], Attempt], *, fastest: bool = False
) -> Attempt:
    """Return the largest micro-batch size that fits into memory.

    Args:
        candidates: the sizes to choose from.
        attempt: tries a size.
        fastest: also try all sizes below it, and return that with the least time per sample.

    Raises:
        MemoryError: not even the smallest size fits.
    """
    ordered = sorted(candidates)
    fitting: list[Attempt] = []
    low = -1  # index of the largest size that is known to fit
    high = len(ordered) - 1  # index of the smallest size that is known not to fit

    # Try the largest size first: if it fits, the search is over.
    first = attempt(ordered[-1])
    if first.fits:
        fitting.append(first)
        low = high

    # Halve the range between them.
    while high - low > 1:
        middle = (low + high) // 2
        tried = attempt(ordered[middle])
        if tried.fits:
            low = middle
            fitting.append(tried)
        else:
            high = middle
    if not fitting:
        raise MemoryError(f"not even a micro-batch of {ordered[0]} fits into memory")
    largest = max(fitting, key=lambda tried: tried.micro)
    if not fastest:
        return largest

    # Time the smaller sizes that the search left out, too.
    tried_already = {tried.micro for tried in fitting}
    for micro in ordered:
        if micro < largest.micro and micro not in tried_already:
            tried = attempt(micro)
            if tried.fits:
                fitting.append(tried)
    return min(fitting, key=lambda tried: tried.seconds)


def is_outside_of_allocator(error: BaseException) -> bool:
    """Return whether a program that uses a GPU ran out of memory that torch does not manage there.

    It is memory of the host, also pinned memory, or a part of the GPU's that CUDA itself needs. If
    an allocation of torch on the GPU fails, it raises OutOfMemoryError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    known = ("CUDA error: out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in known)


class Child:
    """A child process that runs trial steps.

    After it ran out of memory, the next attempt starts a new one.

    Args:
        make: builds the model, and returns the steps. The child must be able to import it.
        device: that the steps use, to measure its memory; None: the GPU if there is one.
        environment: variables that the child sets first (None removes a variable).
        wait: is called repeatedly with two flags: whether this process has an answer, and whether
            the attempt failed. It returns whether all processes have one, and whether any failed.
    """

    def __init__(
        self,
        make: Callable[[], Steps],
        *,
        device: torch.device | None = None,
        environment: Mapping[str, str | None] | None = None,
        wait: Callable[[bool, bool], tuple[bool, bool]] = lambda answered, failed: (
            answered,
            failed,
        ),
    ) -> None:
        self._make = make
        found = torch.accelerator.current_accelerator(check_available=True)
        self._device = device or found or torch.device("cpu")
        self.environment = dict(environment or {})
        self._wait = wait
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the next attempt starts a new process."""
        return self._process is None

    def attempt(self, micro: int) -> Attempt:
        """Run steps with this micro-batch size.

        Raise RuntimeError if they fail for a reason other than memory.
        """
        # Start a process, which builds the model.
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, child_end = context.Pipe()
            self._process = context.Process(
                target=_serve,
                args=(child_end, self._make, self._device, self.environment, os.getpid()),
            )
            self._process.start()
            child_end.close()
        self._pipe.send(micro)

        # Wait until all processes have an answer, or one has failed.
        answer: Attempt | _Failure | None = None
        while True:
            if answer is None and self._pipe.poll(0.05):
                answer = self._receive()
            everyone, anyone_failed = self._wait(answer is not None, isinstance(answer, _Failure))
            if anyone_failed:
                self.close()
                if isinstance(answer, _Failure) and answer.error:
                    raise RuntimeError(
                        f"a trial step with micro-batch {micro} failed: {answer.error}"
                    )
                return Attempt(micro, fits=False)
            if everyone and isinstance(answer, Attempt):
                return answer
            time.sleep(0.02)

    def _receive(self) -> "Attempt | _Failure":
        try:
            answer: Attempt | _Failure = self._pipe.recv()
            return answer
        except (EOFError, ConnectionResetError):
            self._process.join()
            if self._process.exitcode == -9:  # SIGKILL: the kernel's out-of-memory killer
                return _Failure(error=None)
            return _Failure(f"its process ended with {self._process.exitcode}")

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


@dataclass(frozen=True)
class _Failure:
    """A child's answer if a step failed."""

    error: str | None  # with a traceback; None: out of memory


def _serve(
    pipe: Connection,
    make: Callable[[], Steps],
    device: torch.device,
    environment: dict[str, str | None],
    parent: int,
) -> None:
    # The environment must be set before the model is built.
    die_with(parent)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

    # Answer each micro-batch size. Build the model for the first one.
    steps: Steps | None = None
    while True:
        micro = pipe.recv()
        try:
            steps = steps or make()
            steps(micro)  # the first step allocates the optimizer state

            # Time three more.
            times = []
            for _ in range(3):
                began = time.perf_counter()
                steps(micro)
                times.append(time.perf_counter() - began)
            pipe.send(Attempt(micro, True, median(times) / micro, peak_memory(device)))
        except BaseException as error:
            fault = None
            if not is_out_of_memory(error):
                fault = "".join(traceback.format_exception(error)).strip()
            pipe.send(_Failure(fault))
            return
