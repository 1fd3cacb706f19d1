"""Does a data set return the same sample each time? Compare two loads by content."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

IN_PLACE = "changes what it stores when a sample is read"
OTHER = "returns other content for the same sample and seeds (its own generator, counter or state)"


def copied(sample: Any) -> list[Any]:
    """Return copies of the tensors and arrays of a sample, in order."""
    copies = []
    for value in _arrays(sample):
        copies.append(value.detach().clone() if isinstance(value, Tensor) else value.copy())
    return copies


def fault(before: list[Any], first: Any, second: Any) -> str:
    """Return what is wrong with a data set that loaded a sample twice; empty: nothing.

    Args:
        before: :func:`copied` from the first load, before the second one.
        first: what the first load returned; it may share memory with the data set.
        second: what the second load returned.
    """
    if not _equal(before, first):
        return IN_PLACE
    return "" if _equal(before, second) else OTHER


def _equal(copies: list[Any], sample: Any) -> bool:
    """Return whether tensors and arrays are bitwise equal; True if that cannot be compared."""
    found = [*_arrays(sample)]
    if len(found) != len(copies):
        return False
    return all(map(_same, copies, found))


def _arrays(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a value and its containers."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _arrays(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _arrays(one)


def _same(copy: Any, value: Any) -> bool:
    if type(copy) is not type(value) or copy.shape != value.shape or copy.dtype != value.dtype:
        return False
    if isinstance(copy, Tensor):
        # NaN equals NaN
        return bool(((copy == value) | ((copy != copy) & (value != value))).all())
    return bool(copy.tobytes() == value.tobytes())
