"""One hash of any value: of tensors, arrays, texts, numbers, containers and objects.

>>> content_hash({"x": torch.ones(2), "names": ["a"]})
'5c…'
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from oneloop.basics.tensor_hash import as_bits

_DEEPEST = 8  # objects may refer to each other


def content_hash(value: Any, depth: int = 0) -> str:
    """Return a hash of a value (xxh3-64), which is the same in every process.

    It covers types, dtypes, shapes and all bits, and no order of dicts and sets. Objects without
    attributes, such as dates, decimals and paths, count by their text (``repr``). If it contains an
    address in memory, they count by the name of their class.

    Args:
        value: the value.
        depth: number of containers and objects around it.
    """
    state = xxh3_64(type(value).__name__.encode())
    inside: Iterable[Any] = ()
    if depth > _DEEPEST:
        return state.hexdigest()

    # Tensors, arrays and texts.
    if isinstance(value, Tensor):
        if is_strided(value):
            state.update(f"{value.dtype}{tuple(value.shape)}".encode())
            state.update(as_bits(value).cpu().contiguous().numpy().data)
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:  # its bytes are addresses
            inside = value.tolist()
        else:
            state.update(value.tobytes())
    elif isinstance(value, str):
        state.update(value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes):
        state.update(value)

    # Containers, images of PIL, and objects with attributes.
    elif isinstance(value, Mapping):
        inside = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, set | frozenset):
        inside = sorted(map(content_hash, value))
    elif isinstance(value, list | tuple):
        inside = value
    elif hasattr(value, "tobytes") and hasattr(value, "size"):
        state.update(repr(value.size).encode() + value.tobytes())
    elif getattr(value, "__dict__", None):
        inside = [vars(value)]
    elif " at 0x" not in repr(value):
        state.update(repr(value).encode(errors="surrogatepass"))

    for part in inside:
        state.update(content_hash(part, depth + 1).encode())
    return state.hexdigest()


def is_strided(tensor: Tensor) -> bool:
    """Return whether elements can be read: a tensor that is not sparse, nested or fake."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def content_hashes(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each entry of a batch. Host sync."""
    return {name: content_hash(value) for name, value in batch.items()}
