"""Hashes of tensors that depend on every element and its position, and not on the sharding.

They are those of :mod:`oneloop.basics.tensor_hash`, computed on the tensors' device and summed over
the shards in any order.

>>> read = fingerprint({"weight": weight})               # collective
>>> read["bits"]
'04c2…'
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oneloop.basics.seeds import key
from oneloop.basics.tensor_hash import tensor_hash
from oneloop.basics.tensors import first_element


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of all tensors, and a short one of each.

    Collective; one host sync; an all-reduce if any is sharded.

    Returns:
        ``bits``: The hash of all tensors, 16 hexadecimal digits. ``bits_of``: Four
        digits of each tensor's hash, in the order of the names.

    Raises:
        ValueError: A tensor is not sharded by rows over one mesh dimension.
    """
    if not tensors:
        return {"bits": f"{0:016x}", "bits_of": ""}
    ordered = [tensors[name] for name in sorted(tensors)]
    device = ordered[0].device
    hashes = torch.stack(
        [tensor_hash(tensor, first=first_element(tensor)).to(device) for tensor in ordered]
    )

    # Sum the shards of all ranks.
    sharded = [tensor for tensor in ordered if isinstance(tensor, DTensor)]
    if sharded:
        group = sharded[0].device_mesh.get_group()
        replicated = [not isinstance(tensor, DTensor) for tensor in ordered]
        whole = torch.tensor(replicated, device=device)
        hashes[whole] *= int(dist.get_rank(group) == 0)  # count replicated tensors once
        dist.all_reduce(hashes, group=group)

    values: list[int] = hashes.tolist()  # host sync
    return {
        "bits": f"{key(*values):016x}",
        "bits_of": "".join(f"{key(value) & 0xFFFF:04x}" for value in values),
    }
