"""Hashes of tensors that depend on every element and its position, and not on the sharding.

A hash is the sum, modulo 2^64, of each element's bits times an odd number that depends on its index
(multilinear hashing: Lemire & Kaser 2014). One changed element always changes the hash, and shards
are summed in any order. Hashes are computed on the tensors' device.

>>> read = fingerprint({"weight": weight})               # collective
>>> read["bits"]
'04c2…'
"""

import base64
import struct
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oneloop.basics.seeds import GOLDEN, key
from oneloop.basics.tensors import as_real, first_element, local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20  # elements


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of all tensors, and a short one of each.

    Collective; one host sync; an all-reduce if any is sharded.

    Returns:
        ``bits``: The hash of all tensors, 16 hexadecimal digits. ``bits_of``: Two bytes
        (little-endian) of each tensor's hash in the order of the names, in base64.

    Raises:
        ValueError: A tensor is not sharded by rows over one mesh dimension.
    """
    if not tensors:
        return {"bits": f"{0:016x}", "bits_of": ""}
    ordered = [tensors[name] for name in sorted(tensors)]
    device = ordered[0].device
    hashes = torch.stack([_hash(tensor).to(device) for tensor in ordered])

    # Sum the shards of all ranks.
    sharded = [tensor for tensor in ordered if isinstance(tensor, DTensor)]
    if sharded:
        group = sharded[0].device_mesh.get_group()
        replicated = [not isinstance(tensor, DTensor) for tensor in ordered]
        whole = torch.tensor(replicated, device=device)
        hashes[whole] *= int(dist.get_rank(group) == 0)  # count replicated tensors once
        dist.all_reduce(hashes, group=group)

    values: list[int] = hashes.tolist()  # host sync
    short = b"".join(struct.pack("<H", key(value) & 0xFFFF) for value in values)
    return {
        "bits": f"{key(*values):016x}",
        "bits_of": base64.b64encode(short).decode(),
    }


def _hash(tensor: Tensor) -> Tensor:
    mine = as_real(local(tensor.detach())).reshape(-1)
    mine = mine.view(_BITS[mine.element_size()])
    first = first_element(tensor)
    total = torch.zeros((), dtype=torch.int64, device=mine.device)
    for begin in range(0, mine.numel(), _AT_ONCE):
        part = mine[begin : begin + _AT_ONCE]
        # The factor of an element depends on its index in the whole tensor, and is odd.
        index = first + begin + 1
        factor = torch.arange(index, index + part.numel(), device=mine.device)
        factor *= GOLDEN - (1 << 64)  # as a signed number: the product is taken modulo 2^64
        factor ^= factor >> 32
        factor |= 1
        total += (factor * part).sum()
    return total
