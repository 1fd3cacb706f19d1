"""Find the largest micro-batch that fits, by real steps in a child process, which may run out of
memory.

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

from oneloop.basics.launcher import die_with
from oneloop.basics.memory import peak_memory

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
    """Return the largest of the micro-batch sizes ``candidates`` that fits into memory, as
    ``attempt`` finds out.

    ``fastest`` tries all sizes below it, too, and returns the one with the least time per sample.
    Raise MemoryError if not even the smallest fits."""
    ordered = sorted(candidates)
    fitting = [tried for tried in [attempt(ordered[-1])] if tried.fits]
    # indices: the largest known to fit, the smallest known not to fit
    low, high = -1, len(ordered) - 1
    while not (fitting and fitting[-1].micro == ordered[-1]) and high - low > 1:
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
    tried_already = {tried.micro for tried in fitting}
    fitting += [
        attempt(micro) for micro in ordered if micro < largest.micro and micro not in tried_already
    ]
    return min((tried for tried in fitting if tried.fits), key=lambda tried: tried.seconds)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(
            words in str(error)
            for words in ("out of memory", "can't allocate memory", "ALLOC_FAILED")
        )
    )


class Child:
    """A child process that runs trial steps; after it ran out of memory, the next attempt starts a
    new one.

    ``make``, which the child must be able to import, builds the model and returns the steps, after
    the ``environment`` is set (None removes a variable). ``wait`` is called repeatedly with two
    flags: whether this process has an answer, and whether the attempt failed. It returns whether
    all processes have one, and whether any failed."""

    def __init__(
        self,
        make: Callable[[], Steps],
        *,
        environment: Mapping[str, str | None] | None = None,
        wait: Callable[[bool, bool], tuple[bool, bool]] = lambda answered, failed: (
            answered,
            failed,
        ),
    ) -> None:
        self._make, self.environment, self._wait = make, dict(environment or {}), wait
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
        """Run steps with this micro-batch size. Raise RuntimeError if they fail for a reason other
        than memory."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, child_end = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(child_end, self._make, self.environment, os.getpid())
            )
            self._process.start()
            child_end.close()
        self._pipe.send(micro)
        answer: dict[str, Any] | None = None
        while True:
            if answer is None and self._pipe.poll(0.05):
                answer = self._receive()
            everyone, anyone_failed = self._wait(
                answer is not None, answer is not None and not answer["fits"]
            )
            if anyone_failed:
                self.close()
                if answer is not None and answer.get("error"):
                    raise RuntimeError(
                        f"a trial step with micro-batch {micro} failed: {answer['error']}"
                    )
                return Attempt(micro, fits=False)
            if everyone and answer is not None:
                return Attempt(**answer)
            time.sleep(0.02)

    def _receive(self) -> dict[str, Any]:
        try:
            return dict(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            self._process.join()
            killed = self._process.exitcode == -9  # SIGKILL: the kernel's out-of-memory killer
            return {
                "fits": False,
                "error": None if killed else f"its process ended with {self._process.exitcode}",
            }

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(
    pipe: Connection, make: Callable[[], Steps], environment: dict[str, str | None], parent: int
) -> None:
    die_with(parent)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    steps: Steps | None = None
    while True:
        micro = pipe.recv()
        try:
            steps = steps or make()
            steps(micro)  # the first step allocates the optimizer state
            times = []
            for _ in range(3):
                began = time.perf_counter()
                steps(micro)
                times.append(time.perf_counter() - began)
            pipe.send(
                {
                    "micro": micro,
                    "fits": True,
                    "seconds": median(times) / micro,
                    "peak": peak_memory(),
                }
            )
        except BaseException as error:
            fault = (
                None
                if is_out_of_memory(error)
                else "".join(traceback.format_exception(error)).strip()
            )
            pipe.send({"micro": micro, "fits": False, "error": fault})
            return
