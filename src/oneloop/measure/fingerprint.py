"""Hashes of tensors that depend on every element and its place, and not on how the tensors are sharded.

A hash is the sum, modulo 2^64, of each element's bits times an odd number made of its place (multilinear hashing:
Lemire & Kaser 2014): one element that changed always shows, and parts are summed in any order. Computed where the
tensors are.

>>> read = fingerprint({"weight": weight})               # every rank must get here
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
    """One hash of all, as 16 hexadecimal digits (``bits``), and two bytes of each tensor's own, in the order of the
    names, in base64 (``bits_of``; little-endian). One small all-reduce where something is sharded; one host sync.

    Raises:
        ValueError: a tensor is sharded otherwise than by rows over one dimension of ranks.
    """
    if not tensors:
        return {"bits": f"{0:016x}", "bits_of": ""}
    parts = [tensors[name] for name in sorted(tensors)]
    device = parts[0].device
    hashes = torch.stack([_hash(part).to(device) for part in parts])
    if sharded := [part for part in parts if isinstance(part, DTensor)]:
        group = sharded[0].device_mesh.get_group()
        whole = torch.tensor([not isinstance(part, DTensor) for part in parts], device=device)
        hashes[whole] *= int(dist.get_rank(group) == 0)  # which every rank has
        dist.all_reduce(hashes, group=group)
    values: list[int] = hashes.tolist()  # host sync
    short = b"".join(struct.pack("<H", key(value) & 0xFFFF) for value in values)
    return {"bits": f"{key(*values):016x}", "bits_of": base64.b64encode(short).decode()}


def _hash(tensor: Tensor) -> Tensor:
    mine = as_real(local(tensor.detach())).reshape(-1)
    mine = mine.view(_BITS[mine.element_size()])
    first = first_element(tensor)
    total = torch.zeros((), dtype=torch.int64, device=mine.device)
    for begin in range(0, mine.numel(), _AT_ONCE):
        part = mine[begin : begin + _AT_ONCE]
        factor = torch.arange(first + begin + 1, first + begin + 1 + part.numel(), device=mine.device)
        factor *= GOLDEN - (1 << 64)  # as a signed number: the product is taken modulo 2^64
        factor ^= factor >> 32
        factor |= 1
        total += (factor * part).sum()
    return total
