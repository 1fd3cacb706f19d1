"""The values of Python objects at a moment, to compare and to restore them.

>>> before = Snapshot({"task": task, "model": model})
>>> before.changed()                     # names of what has another value now
['model.queue']
>>> before.restore()

A snapshot follows attributes and containers of the user's own objects. It covers numbers, texts,
containers, tensors, arrays and generators of random numbers. It does not cover what cannot be
compared: open files, iterators, and objects of other libraries.
"""

import random
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from oneloop.basics.tensor_hash import as_bits, tensor_hashes

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_LONG = 1000  # elements; those of a longer container are compared by identity only
_MOST = 20_000  # objects of a snapshot
_COPIED = 1 << 26  # bytes of tensors and arrays that are copied
_OTHERS = {
    "accelerate",
    "builtins",
    "datasets",
    "numpy",
    "oneloop",
    "pyarrow",
    "timm",
    "tokenizers",
    "torch",
    "torchmetrics",
    "torchvision",
    "transformers",
}
"""packages whose objects are not followed, except modules of a model"""
_REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module: they do not show in names


class _Record(NamedTuple):
    """A value that can change in place."""

    name: str
    copy: Any  # the value at the moment of the snapshot
    now: Callable[[], Any]  # returns the value now
    same: Callable[[Any, Any], bool]  # compares both
    restore: Callable[[], object]

    @property
    def differs(self) -> bool:
        return not self.same(self.now(), self.copy)

    def changed(self) -> list[str]:
        """Return the names of what differs: of an object its attributes."""
        now = self.now()
        if self.same(now, self.copy):
            return []
        if not isinstance(now, dict):
            return [self.name]
        names = []
        for key in {**self.copy, **now}:
            both = key in now and key in self.copy
            if not (both and _same_value(now[key], self.copy[key])):
                names.append(f"{self.name}.{key}")
        return names or [self.name]


class Snapshot:
    """The values that are reachable from some objects.

    Args:
        roots: the objects by name. Those that are no object of another library are followed to
            their attributes, and to the attributes of their classes.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._records: list[_Record] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # keeps the addresses in ``_seen`` valid
        self._bytes = 0
        waiting = [*roots.items()]
        self._roots = {id(root) for root in roots.values()}
        while waiting and len(self._seen) < _MOST:
            name, value = waiting.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            waiting += self._inside(name, value)

    def changed(self) -> list[str]:
        """Return the names of the values that differ now. Host sync."""
        names = []
        for record in self._records:
            names += record.changed()
        return names

    def digests(self) -> dict[str, int]:
        """Return a hash of each value of the snapshot, to compare processes. Host sync."""
        found = {}
        for record in self._records:
            for name, value in _parts(record.name, record.copy):
                found[name] = _digest(value)
        return found

    def restore(self) -> None:
        """Restore what differs. Host sync."""
        for record in self._records:
            if record.differs:
                record.restore()

    def _inside(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Record a value; return the values inside it, with their names."""
        if isinstance(value, Tensor):
            # job/restore.py copies parameters.
            if not isinstance(value, nn.Parameter):
                self._keep_array(name, value, value.numel() * value.element_size())
            return []
        if isinstance(value, np.ndarray):
            if not value.dtype.hasobject:
                self._keep_array(name, value, value.nbytes)
            return []
        if isinstance(value, tuple | frozenset):
            return [(name, one) for one in value] if len(value) <= _LONG else []
        if isinstance(value, _CONTAINERS):
            self._keep_container(name, value)
            return [*_elements(name, value)] if len(value) <= _LONG else []
        if state := _generator_state(value):
            self._keep_generator(name, *state)
            return []
        if isinstance(value, type):
            return self._keep_class(name, value) if _is_own(value) else []
        if isinstance(value, nn.Module) or id(value) in self._roots or _is_own(type(value)):
            attributes = getattr(value, "__dict__", None)
            if not isinstance(attributes, dict):
                return []
            self._keep_container(name, attributes)
            found: list[tuple[str, Any]] = []
            for kind in type(value).__mro__:
                found.append((kind.__name__, kind))
            for key, one in attributes.items():
                found.append((name if key in _REGISTRIES else f"{name}.{key}", one))
            return found
        return []

    def _keep_array(self, name: str, value: Any, size: int) -> None:
        """Record a tensor or an array, if it is not too large."""
        if self._bytes + size > _COPIED or not _is_strided(value):
            return
        self._bytes += size
        copy = _copied(value)

        def restore() -> None:
            with torch.no_grad():
                value[...] = copy

        self._records.append(_Record(name, copy, lambda: value, _same_bits, restore))

    def _keep_container(self, name: str, value: Any) -> None:
        """Record which elements a container has."""
        copy = value.copy()

        def restore() -> None:
            value.clear()
            if isinstance(value, dict | set):
                value.update(copy)
            else:
                value.extend(copy)

        self._records.append(_Record(name, copy, lambda: value, _same_elements, restore))

    def _keep_generator(
        self, name: str, get: Callable[[], Any], put: Callable[[Any], object]
    ) -> None:
        state = get()
        self._records.append(_Record(name, state, get, _same_state, lambda: put(state)))

    def _keep_class(self, name: str, kind: type) -> list[tuple[str, Any]]:
        """Record the attributes of a class; return them."""

        def now() -> dict[str, Any]:
            return {key: value for key, value in vars(kind).items() if _is_data(key, value)}

        copy = now()

        def restore() -> None:
            for key in now().keys() - copy.keys():
                delattr(kind, key)
            for key, value in copy.items():
                setattr(kind, key, value)

        self._records.append(_Record(name, copy, now, _same_elements, restore))
        return [(f"{name}.{key}", value) for key, value in copy.items()]


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a container by name, or a value that is not a container."""
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, _PLAIN):
                yield f"{name}.{key}", one
    elif isinstance(value, list | set | deque):
        yield name, [one for one in value if isinstance(one, _PLAIN)]
    else:
        yield name, value


def _digest(value: Any) -> int:
    """Return a hash that is equal in all processes."""
    if isinstance(value, Tensor):
        return tensor_hashes([value])[0]
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    return zlib.crc32(repr(value).encode())


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's: not of Python or of a known library."""
    package = kind.__module__.partition(".")[0]
    return package not in _OTHERS and package not in sys.stdlib_module_names - {"__main__"}


def _is_data(key: str, value: Any) -> bool:
    """Return whether an attribute of a class is data: no method, property or nested class."""
    if key.startswith("__") or key.startswith("_abc_"):
        return False
    return isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor, np.ndarray, tuple, frozenset))


def _elements(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"{name}.{key}", one
    else:
        for one in value:
            yield name, one


def _is_strided(value: Any) -> bool:
    """Return whether elements can be read and written: a plain tensor, not sparse or fake."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    return type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta"


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _same_bits(value: Any, copy: Any) -> bool:
    if value.shape != copy.shape or value.dtype != copy.dtype:
        return False
    if isinstance(value, Tensor):
        return torch.equal(as_bits(value), as_bits(copy))
    return bool(value.tobytes() == copy.tobytes())


def _same_elements(value: Any, copy: Any) -> bool:
    """Return whether two containers have the same elements, in the same order."""
    if len(value) != len(copy):
        return False
    if isinstance(value, set):
        return bool(value == copy)
    if isinstance(value, dict):
        if list(value) != list(copy):
            return False
        return all(map(_same_value, value.values(), copy.values()))
    return all(map(_same_value, value, copy))


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _same_state(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)


def _generator_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return how to get and to set the state of a generator of random numbers, or None."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: _with_lists(value.get_state(legacy=False)), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return lambda: _with_lists(bits.state), put
    return None


def _with_lists(state: Any) -> Any:
    """Return numpy's state with its arrays as tuples, which compare by value."""
    if isinstance(state, dict):
        return {key: _with_lists(value) for key, value in state.items()}
    return tuple(state.tolist()) if isinstance(state, np.ndarray) else state
