"""Hashes of a tensor's content, which depend on every element and its position.

A hash is the sum, modulo 2^64, of each element's bits times an odd number that depends on its index
(multilinear hashing: Lemire & Kaser 2014). One changed element always changes the hash. The hashes
of the shards of a tensor sum to the hash of the whole tensor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from oneloop.basics.seeds import GOLDEN
from oneloop.basics.tensors import as_real, local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20  # elements
_AT_ONCE_ON_CPU = 1 << 18  # which fit into a cache
_LOWER = (1 << 32) - 1


def as_bits(tensor: Tensor) -> Tensor:
    """Return the elements of this rank's shard as integers of the same size, 1-dim.

    It is a view if the shard is contiguous.
    """
    mine = as_real(local(tensor.detach())).reshape(-1)
    return mine.view(_BITS[mine.element_size()])


@torch.no_grad()
def tensor_hash(tensor: Tensor, *, first: int = 0) -> Tensor:
    """Return the hash of this rank's shard, 0-dim int64, on its device.

    Args:
        tensor: plain, or a DTensor.
        first: index of the shard's first element in the whole tensor.
    """
    bits = as_bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _AT_ONCE_ON_CPU if bits.device.type == "cpu" else _AT_ONCE
    for begin in range(0, bits.numel(), size):
        part = bits[begin : begin + size]
        # Two changes of the highest of 64 bits would cancel: copy the upper half to the lower one.
        if part.dtype is torch.int64:
            part = part ^ ((part >> 32) & _LOWER)
        # The factor of an element depends on its index in the whole tensor, and is odd.
        index = first + begin + 1
        factor = torch.arange(index, index + part.numel(), device=bits.device)
        factor *= GOLDEN - (1 << 64)  # as a signed number: the product is taken modulo 2^64
        factor ^= factor >> 32
        factor |= 1
        total += (factor * part).sum()
    return total


def tensor_hashes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the hashes of several tensors as numbers. Host sync."""
    hashes = [tensor_hash(tensor) for tensor in tensors]
    if not hashes:
        return []
    device = hashes[0].device
    numbers: list[int] = torch.stack([one.to(device) for one in hashes]).tolist()
    return numbers
