"""The processes that load data: how many, how they begin, and how they end."""

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from oneloop.basics.exit_codes import ERROR, BadInput
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.basics.system.start_methods import spawns, start_context

Loaded = TypeVar("Loaded")

_NO_SPACE = 28  # exit code of a data worker if shared memory is full: ENOSPC


def workers_here(requested: int | str, *, device: torch.device, cores: int) -> int:
    """Return the number of worker processes per training process.

    Args:
        requested: a number, or ``auto``.
        device: the device that trains.
        cores: CPUs of this training process.
    """
    if requested != "auto":
        return int(requested)
    # On a CPU the cores train. On a Mac, a process takes seconds to start, and can neither inherit
    # the data nor find a class of a notebook.
    if device.type in ("cpu", "mps"):
        return 0
    return max(1, min(8, cores - 1))


def load_by_workers(
    dataset: Dataset[Loaded],
    workers: int,
    **options: Any,
) -> DataLoader[Loaded]:
    """Return what a data set loads, as it is; draw nothing from the global generator.

    Args:
        dataset: returns batches.
        workers: worker processes; 0: load in this process.
        options: other arguments of DataLoader.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_identity,
        num_workers=workers,
        multiprocessing_context=start_context() if workers else None,
        worker_init_fn=partial(begin_worker, os.getpid()),
        generator=torch.Generator(),
        **options,
    )


def _identity(batch: Any) -> Any:
    """Return what a data set has collated already."""
    return batch


def end_workers(error: BaseException | None) -> None:
    """Shut down DataLoader workers after an exception.

    The traceback of the exception, or of a cause, keeps their iterator alive. Torch would then
    raise in unrelated code when a worker ends.

    Args:
        error: the exception; None does nothing.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.data.dataloader.__file__:
                frame.clear()
        error = error.__cause__ or error.__context__


def from_workers(loading: Iterable[Loaded]) -> Generator[Loaded]:
    """Yield what the workers load.

    Raise RuntimeError if one has exited, however torch reports that, and BadInput if the system
    starts workers by spawn, and the data cannot be sent to them.
    """
    try:
        # No variable holds the iterator: the traceback of an exception would keep the workers, too.
        yield from _started(loading)
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            f"a DataLoader worker exited without an error message ({error})"
        ) from error
    except RuntimeError as error:
        text = f"{error} {error.__cause__}"
        if f"exit code {_NO_SPACE}" not in text and "Bus error" not in text:
            raise
        raise RuntimeError(
            "a data worker cannot send a batch, because shared memory (/dev/shm) is full; make it "
            "larger (docker run --shm-size 8g), or use fewer data workers (machine.workers) or "
            "smaller micro-batches (batch.micro)"
        ) from error


def _started(loading: Iterable[Loaded]) -> Iterator[Loaded]:
    """Start the workers. Raise BadInput if the data cannot be sent to them."""
    if spawns():
        BEATS.wait_for_start()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # and torch's wrong advice: fork
            return iter(loading)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if not spawns():
            raise
        raise BadInput(
            f"the task or its data cannot be sent to data workers: {error}; define its classes and "
            "functions at the top level of a file, open files at the first sample, "
            "or use no data workers (machine.workers 0; see docs/how-to/data-workers.md)"
        ) from error


def begin_worker(parent: int, number: int) -> None:
    """End with the training process, and ignore stop signals: the training process handles them."""
    die_with(parent)
    on_stops(signal.SIG_IGN)
    # By default, a batch that cannot be sent is lost, and the training process waits for it.
    Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]


def _cannot_send(error: Exception, batch: object) -> None:
    """End this data worker, which cannot send a batch."""
    print(f"oneloop: a data worker cannot send a batch: {error}", file=sys.stderr, flush=True)
    os._exit(_NO_SPACE if "No space left" in str(error) else ERROR)
