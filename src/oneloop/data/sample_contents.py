"""Does a data set return the same sample each time? Compare two loads by content."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

IN_PLACE = "changes what it stores when a sample is read"
BY_COLLATE = "stores the samples that collate changes in place"
OTHER = "returns other content for the same sample and seeds (its own generator, counter or state)"

_PLAIN = (str, bytes, int, float, complex, np.generic)


def copied(value: Any) -> Any:
    """Return a sample with copies of its tensors, arrays, dicts and lists."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.layout is torch.strided else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: copied(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def fault(kept: Any, first: Any, again: Any, *, changed: bool) -> str:
    """Return what is wrong with a data set that loaded some samples twice; empty: nothing.

    Args:
        kept: copies of the samples of the first load, from before the second one.
        first: what the first load returned; it may share memory with the data set.
        again: what the second load returned.
        changed: whether collate changes samples in place.
    """
    if not same(kept, first):
        return IN_PLACE
    if not same(kept, again):
        return OTHER
    pairs = zip(_arrays(first), _arrays(again), strict=True)
    stored = any(_address(one) == _address(other) for one, other in pairs)
    return BY_COLLATE if stored and changed else ""


def same(some: Any, others: Any) -> bool:
    """Return whether tensors, arrays, numbers and texts are equal; other objects count as equal."""
    pairs = [*_values(some)], [*_values(others)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(map(_same, *pairs))


def _address(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int(value.__array_interface__["data"][0])


def _arrays(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a value and its containers."""
    for one in _values(value):
        if not isinstance(one, _PLAIN):
            yield one


def _values(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays, numbers and texts in a value and its containers."""
    if isinstance(value, _PLAIN):
        yield value
    elif isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _values(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _values(one)


def _same(copy: Any, value: Any) -> bool:
    if type(copy) is not type(value):
        return False
    if isinstance(copy, _PLAIN):
        return bool(copy == value or (copy != copy and value != value))
    if copy.shape != value.shape or copy.dtype != value.dtype:
        return False
    if isinstance(copy, Tensor):
        # NaN equals NaN
        return bool(((copy == value) | ((copy != copy) & (value != value))).all())
    return bool(copy.tobytes() == value.tobytes())
