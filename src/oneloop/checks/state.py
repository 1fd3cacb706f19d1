"""State that a forward must not change: compare it by hashes, and undo what a trial has changed.

>>> before = state_hashes(model)
>>> with restored(device, model, {"task": task}) as values:
...     loss(model, batch).backward()
...     [*differences(before, state_hashes(model))]        # names of tensors
...     values.changed()                            # of attributes
['buffer queue']
['model.calls', 'task.history']

:func:`restored` follows attributes and containers of the user's own objects. It covers numbers,
texts, containers, tensors, arrays and generators of random numbers. It does not cover what cannot
be compared: open files, iterators, and objects of other libraries.
"""

import random
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.content_hash import content_hash, is_strided
from oneloop.basics.differences import differences
from oneloop.basics.exit_codes import Inexact
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import restored_generators
from oneloop.basics.tensor_hash import as_bits, tensor_hashes
from oneloop.basics.tensors import local, reshard

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_LONG = 1000  # elements; those of a longer container are compared by identity only
_MOST = 20_000  # objects that are followed
_COPIED = 1 << 26  # bytes of tensors and arrays that are copied, besides those of a model
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
_ALL = ""  # name of a content without names
# Registries of a module do not show in names.
_HIDDEN = ("_parameters", "_buffers", "_modules", _ALL)


def registered(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model as they are registered now, by kind and name.

    A tied tensor has several names. FSDP2's parameters are this rank's shards.
    """
    reshard(model)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensors[f"parameter {bare_name(name)}"] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tensors[f"buffer {bare_name(name)}"] = buffer
    return tensors


def state_hashes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Return a hash of each tensor of a model, and of its optimizer, by kind and name. Host sync.

    A hash covers all bits of this rank's shard, its shape and dtype, and whether it is trained.

    Args:
        model: bare, or as prepared.
        optimizer: of the model.
    """
    tensors = registered(model)
    if optimizer is not None:
        for name, tensor in optimizer_tensors(model, optimizer).items():
            tensors[name.replace(".", " ", 1)] = tensor
    hashes = tensor_hashes(local(tensor.detach()) for tensor in tensors.values())
    found = {}
    for (name, tensor), number in zip(tensors.items(), hashes, strict=True):
        about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"
        found[name] = number ^ zlib.crc32(about.encode())
    return found


@contextmanager
def restored(
    device: torch.device,
    model: nn.Module,
    others: Mapping[str, Any],
    *,
    most: int = 1 << 30,
) -> Iterator["Values"]:
    """Undo on exit what forward, backward and loading change; gradients are None then.

    Restore parameters, buffers, modes and hooks of the model, attributes of all objects, and the
    global generators. Yield the values as they were.

    Args:
        device: of the model.
        model: bare, or sharded by FSDP2.
        others: more objects by name, such as the task and its data sets.
        most: largest bytes of parameters that are copied; a change of more cannot be undone.

    Raises:
        Inexact: parameters have changed, and were not copied.
    """
    reshard(model)
    buffers = {id(buffer) for buffer in model.buffers()}
    parameters = {id(parameter) for parameter in model.parameters()}
    copied = sum(local(one.detach()).nbytes for one in model.parameters()) <= most
    values = Values({"model": model, **others}, buffers | parameters if copied else buffers)
    before = {} if copied else state_hashes(model)
    try:
        with restored_generators(device):
            yield values
    finally:
        reshard(model)
        values.restore()
        model.zero_grad(set_to_none=True)
    if copied:
        return
    for name in differences(before, state_hashes(model)):
        raise Inexact(
            f"a forward in training cannot be undone, because it changes the {name}, and "
            f"parameters of more than {most / 1e6:,.0f} MB are not copied; change it outside of "
            "the forward, or set machine.check_every 0"
        )


class _Value(NamedTuple):
    """A value that can change in place."""

    name: str
    before: Any  # its content
    get: Callable[[], Any]  # returns its content now
    put: Callable[[Any], object]  # sets its content


class Values:
    """The values that are reachable from some objects, at a moment.

    Args:
        roots: the objects by name. The user's objects and modules are followed to their attributes,
            and to those of their classes.
        copied: ids of tensors that are copied in any case. Other parameters are not.
    """

    def __init__(self, roots: Mapping[str, Any], copied: set[int]) -> None:
        self._values: list[_Value] = []
        self._copied = copied
        self._left = _COPIED
        self._roots = {id(root) for root in roots.values()}
        seen: dict[int, Any] = {}  # keeps them, so that no other object gets their address
        waiting = [*roots.items()]
        while waiting and len(seen) < _MOST:
            name, value = waiting.pop()
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            waiting += self._follow(name, value)

    def changed(self) -> list[str]:
        """Return the names of the values that differ now: of a dict its keys. Host sync."""
        names = []
        for value in self._values:
            changed = differences(_digest(value.before), _digest(value.get()))
            names += [_inner_name(value.name, key) for key in changed]
        return names

    def restore(self) -> None:
        """Restore the values."""
        for value in self._values:
            value.put(value.before)

    def _keep(self, name: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._values.append(_Value(name, get(), get, put))

    def _follow(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Record the content of a value; return what it holds, with names."""
        # Containers.
        if isinstance(value, _CONTAINERS):
            self._keep(name, value.copy, partial(_refill, value))
        if isinstance(value, dict):
            inside = [(_inner_name(name, key), one) for key, one in value.items()]
            return inside if len(value) <= _LONG else []
        if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
            return [(name, one) for one in value] if len(value) <= _LONG else []

        # Tensors, arrays and generators of random numbers.
        if isinstance(value, Tensor):
            if id(value) in self._copied or (
                type(value) is Tensor and is_strided(value) and self._fits(value)
            ):
                self._keep(name, lambda: local(value.detach()).clone(), _setter(value))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and not value.dtype.hasobject and self._fits(value):
                self._keep(name, value.copy, partial(np.copyto, value))
        elif isinstance(value, torch.Generator | np.random.RandomState):
            self._keep(name, value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._keep(name, value.getstate, value.setstate)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._keep(name, lambda: (bits.state,), lambda state: setattr(bits, "state", *state))

        # Classes, and objects.
        elif isinstance(value, type):
            if not _is_own(value):
                return []
            self._keep(name, partial(_data_of, value), partial(_reset_class, value))
            return [(f"{name}.{key}", one) for key, one in _data_of(value).items()]
        elif isinstance(value, nn.Module) or id(value) in self._roots or _is_own(type(value)):
            classes = [(kind.__name__, kind) for kind in type(value).__mro__]
            return [(name, getattr(value, "__dict__", None)), *classes]
        return []

    def _fits(self, value: Any) -> bool:
        """Return whether to copy a tensor or an array that is not of the model."""
        self._left -= value.nbytes
        return self._left >= 0


def _inner_name(name: str, key: Any) -> str:
    return name if key in _HIDDEN else f"{name}.{key}"


def _setter(tensor: Tensor) -> Callable[[Tensor], None]:
    """Return how to set what a tensor holds: this rank's shard, if it has shards."""
    memory = local(tensor.detach())
    trained = tensor.requires_grad

    @torch.no_grad()
    def put(content: Tensor) -> None:
        # Return to the memory of before, after an assignment to .data.
        now = local(tensor.detach())
        moved = (now.data_ptr(), now.shape) != (memory.data_ptr(), memory.shape)
        if moved and not isinstance(tensor, DTensor):
            tensor.data = memory
            now = memory
        # A write would look like a change to a save that is in progress.
        if not torch.equal(as_bits(now), as_bits(content)):
            now.copy_(content)
        if tensor.is_leaf:
            tensor.requires_grad_(trained)

    return put


def _refill(value: Any, copy: Any) -> None:
    """Give a container the elements of its copy, if it has others."""
    if _digest(value) == _digest(copy):
        return  # another thread may read it
    value.clear()
    if isinstance(value, dict | set):
        value.update(copy)
    else:
        value.extend(copy)


def _data_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are data: no methods, properties, nested classes."""
    kinds = (*_PLAIN, *_CONTAINERS, Tensor, np.ndarray, tuple, frozenset)
    found = {}
    for key, value in vars(kind).items():
        if isinstance(value, kinds) and not key.startswith(("__", "_abc_")):
            found[key] = value
    return found


def _reset_class(kind: type, data: dict[str, Any]) -> None:
    for key in _data_of(kind).keys() - data.keys():
        delattr(kind, key)
    for key, value in data.items():
        setattr(kind, key, value)


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's: not of Python or of a known library."""
    package = kind.__module__.partition(".")[0]
    return package not in _OTHERS and package not in sys.stdlib_module_names - {"__main__"}


def _digest(content: Any) -> dict[Any, Any]:
    """Return what can be compared: of a container its elements, which count as objects."""
    if isinstance(content, dict):
        return {key: _element(value) for key, value in content.items()}
    if isinstance(content, _CONTAINERS):
        return {_ALL: [*map(_element, content)]}
    return {_ALL: content_hash(content)}


def _element(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
