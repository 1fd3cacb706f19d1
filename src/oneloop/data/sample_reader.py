"""Read samples outside of the training process, for checks and examples.

A data set may open its file when its first sample is read. If the training process did so, all
data workers that it forks later would share one position in this file, and read wrong samples. A
run with data workers therefore reads no sample in the training process.

>>> with SampleReader(load, workers=2) as read:     # load(7) runs in a data worker
...     sample = read(7)
"""

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from oneloop.basics.system.start_methods import start_context
from oneloop.data.data_workers import begin_worker, from_workers
from oneloop.data.step_batches import identity


class CannotSend(TypeError):
    """A result that cannot be sent from a data worker to the training process."""


class SampleReader:
    """Call a function that reads samples: in one data worker, or without workers in this process.

    On Linux, the worker inherits the function and its data sets; elsewhere they must be picklable.
    Use the reader as a context: the worker starts and ends with it, so that state which the
    function keeps is kept between calls.

    Args:
        function: reads samples; its arguments and results are sent between the processes.
        workers: number of data workers of the run; 0: call the function in this process.
    """

    def __init__(self, function: Callable[..., Any], *, workers: int) -> None:
        self._function = function
        self._requests: Any = None
        self._answers: Iterator[bytes] = iter(())
        if workers:
            self._requests = start_context().SimpleQueue()

    def __enter__(self) -> "SampleReader":
        if self._requests is not None:
            loading: DataLoader[bytes] = DataLoader(
                _Answers(self._function, self._requests),
                batch_size=None,
                collate_fn=identity,
                num_workers=1,
                multiprocessing_context=start_context(),
                worker_init_fn=partial(begin_worker, os.getpid()),
                generator=torch.Generator(),
            )
            self._answers = from_workers(loading)
        return self

    def __exit__(self, *_: object) -> None:
        if self._requests is not None:
            self._requests.put(None)
            self._answers = iter(())  # ends the worker

    def __call__(self, *given: Any) -> Any:
        """Return ``function(*given)``, or raise its exception.

        Raises:
            CannotSend: the result cannot be sent to this process.
            RuntimeError: the worker has exited.
        """
        if self._requests is None:
            return self._function(*given)
        self._requests.put(given)
        result, error, trace = pickle.loads(next(self._answers))
        if error is not None:
            raise error from _InWorker(trace)
        return result


def read_once(function: Callable[[], Any], *, workers: int) -> Any:
    """Return the result of a function that reads samples; see :class:`SampleReader`."""
    with SampleReader(function, workers=workers) as read:
        return read()


class _InWorker(Exception):
    """The traceback of an exception in a data worker, as text."""


class _Answers(IterableDataset[bytes]):
    """The answers of a function to requests, as bytes: a result, or an exception and its text."""

    def __init__(self, function: Callable[..., Any], requests: Any) -> None:
        self._function = function
        self._requests = requests

    def __iter__(self) -> Iterator[bytes]:
        for given in iter(self._requests.get, None):
            try:
                answer = _pickled((self._function(*given), None, ""))
            except (Exception, SystemExit) as error:
                answer = pickle.dumps((None, _sendable(error), traceback.format_exc()))
            yield answer


def _sendable(error: BaseException) -> BaseException:
    """Return an exception as it is, if it can be sent, or one with its type and message."""
    if isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return RuntimeError(
            f"sys.exit({error.code!r}) was called ({frame.filename}:{frame.lineno})"
        )
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _pickled(value: Any) -> bytes:
    stream = BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    except MemoryError:
        raise
    except Exception as error:
        raise CannotSend(f"{type(error).__name__}: {error}") from error
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle of a view only its elements, where torch would take the whole tensor behind it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
            own = value.nbytes
            if value.untyped_storage().nbytes() > own:
                return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
