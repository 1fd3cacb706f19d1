"""Read samples outside of the training process, for checks and examples.

A data set may open its file when its first sample is read. If the training process did so, all
data workers that it forks later would share one position in this file, and read wrong samples. A
run with data workers therefore reads no sample in the training process.

>>> with sample_reader(load, workers=2) as read:     # load(7) runs in a data worker
...     sample = read(7)
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset

from oneloop.basics.system.start_methods import start_context
from oneloop.data.data_workers import from_workers, load_by_workers

Reader = Callable[..., Any]
"""a function that reads samples"""


class CannotSend(TypeError):
    """A result that cannot be sent from a data worker to the training process."""


@contextmanager
def sample_reader(function: Reader, *, workers: int) -> Iterator[Reader]:
    """Yield a function that reads samples, which runs in one data worker, if the run has any.

    On Linux, the worker inherits the function and its data sets; elsewhere they must be picklable.
    The worker starts and ends with this context, so that state which the function keeps is kept
    between calls. A call raises the exception of the function, CannotSend if its result cannot be
    sent to this process, and RuntimeError if the worker has exited.

    Args:
        function: reads samples; its arguments and results are sent between the processes.
        workers: number of data workers of the run; 0: call the function in this process.
    """
    if not workers:
        yield function
        return
    requests = start_context().SimpleQueue()
    answers = from_workers(load_by_workers(_Answers(function, requests), 1))

    def read(*arguments: Any) -> Any:
        requests.put(arguments)
        result, error, trace = pickle.loads(next(answers))
        if error is not None:
            raise error from RuntimeError(trace)
        return result

    try:
        yield read
    finally:
        requests.put(None)
        answers.close()  # ends the worker


class _Answers(IterableDataset[bytes]):
    """The answers of a function to requests, as bytes: a result, or an exception and its text."""

    def __init__(self, function: Reader, requests: Any) -> None:
        self._function = function
        self._requests = requests

    def __iter__(self) -> Iterator[bytes]:
        for arguments in iter(self._requests.get, None):
            try:
                yield _pickled((self._function(*arguments), None, ""))
            except Exception as error:
                yield _pickled((None, _sendable(error), traceback.format_exc()))


def _sendable(error: Exception) -> Exception:
    """Return an exception as it is, if it can be sent, or one with its type and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _pickled(value: Any) -> bytes:
    # Of a view, send its elements, and not the whole tensor behind it.
    value = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise CannotSend(f"{type(error).__name__}: {error}") from error
