"""Hashes of a tensor's content, which depend on every element and its position.

A hash is the sum, modulo 2^64, of each element's bits times an odd number that depends on its index
(multilinear hashing: Lemire & Kaser 2014). One changed element always changes the hash. It is
computed on the tensor's device. The hashes of the shards of a tensor sum to the hash of the whole
tensor, so that a fingerprint does not depend on the sharding.

>>> read = fingerprint({"weight": weight})               # collective
>>> read["bits"]
'04c2…'
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from oneloop.basics.seeds import GOLDEN, key
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
def tensor_hash(tensor: Tensor) -> Tensor:
    """Return the hash of this rank's shard, 0-dim int64, on its device.

    Raise ValueError unless a sharding is by rows over one mesh dimension.
    """
    bits = as_bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _AT_ONCE_ON_CPU if bits.device.type == "cpu" else _AT_ONCE
    # The factor of an element depends on its index in the whole tensor, and is odd.
    index = 1 + (_first_element(tensor) if isinstance(tensor, DTensor) else 0)
    for part in bits.split(size):
        # Two changes of the highest of 64 bits would cancel: copy the upper half to the lower one.
        if part.dtype is torch.int64:
            part = part ^ ((part >> 32) & _LOWER)
        factor = torch.arange(index, index + part.numel(), device=bits.device)
        factor *= GOLDEN - (1 << 64)  # as a signed number: the product is taken modulo 2^64
        factor ^= factor >> 32
        factor |= 1
        total += (factor * part).sum()
        index += part.numel()
    return total


def _first_element(tensor: DTensor) -> int:
    """Return the index of the first element of this rank's shard in the flat tensor."""
    if len(tensor.placements) != 1 or not tensor.placements[0].is_shard(0):
        raise ValueError(
            f"the sharding {tensor.placements} is not supported; expected dim 0 over a 1-D mesh"
        )
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[0]) * math.prod(tensor.shape[1:])


def tensor_hashes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the hashes of several tensors as numbers; sum those of the shards of DTensors.

    Host sync. Collective if there is any DTensor.
    """
    known = [*tensors]
    if not known:
        return []
    hashes = torch.stack([tensor_hash(tensor).to(known[0].device) for tensor in known])
    sharded = [isinstance(tensor, DTensor) for tensor in known]
    if any(sharded):
        mesh = known[sharded.index(True)].device_mesh  # type: ignore[attr-defined]
        shards = hashes[sharded]
        dist.all_reduce(shards, group=mesh.get_group())
        hashes[sharded] = shards
    numbers: list[int] = hashes.tolist()
    return numbers


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of all tensors, and a short one of each.

    Collective; one host sync; an all-reduce if any is sharded.

    Returns:
        ``bits``: The hash of all tensors, 16 hexadecimal digits. ``bits_of``: Four
        digits of each tensor's hash, in the order of the names.

    Raises:
        ValueError: A tensor is not sharded by rows over one mesh dimension.
    """
    values = tensor_hashes(tensors[name] for name in sorted(tensors))
    return {
        "bits": f"{key(*values) if values else 0:016x}",
        "bits_of": "".join(f"{key(value) & 0xFFFF:04x}" for value in values),
    }
