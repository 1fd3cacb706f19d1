"""Whether the ranks that should hold the same numbers do: broken memory and lost updates show here first.

>>> check_replicas(model, optimizer, step=100)           # every rank must get here; raises where they differ
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import as_real, local, optimizer_tensors


class ReplicasDiffer(RuntimeError):
    """Two ranks hold different values of what should be the same."""


def replica_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the same parameters as this one; None where there is no other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    parameter = next(iter(model.parameters()))
    if not isinstance(parameter, DTensor):
        return dist.group.WORLD
    mesh = parameter.device_mesh
    along = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return mesh.get_group(along[0]) if along and mesh.size(along[0]) > 1 else None


def check_replicas(model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
    """Compares hashes of parameters and optimizer state over the replicas; one all-gather, one host sync.

    A hash is ``torch.hash_tensor``'s: every element's bits, so that one flipped bit always shows. Pure FSDP2 and one
    process have no replicas, and nothing is compared.

    Raises:
        ReplicasDiffer: on all ranks, naming rank and tensor.
    """
    group = replica_group(model)
    if group is None:
        return
    named: dict[str, Tensor] = {bare_name(name): parameter for name, parameter in model.named_parameters()}
    named |= optimizer_tensors(model, optimizer)
    device = next(iter(model.parameters())).device
    mine = torch.stack([_hash(tensor, device) for tensor in named.values()])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    hashes_by_rank = dict(zip(ranks, torch.stack(gathered).tolist(), strict=True))  # host sync
    differing: list[tuple[str, list[int]]] = []
    for place, name in enumerate(named):
        hashes = {rank: values[place] for rank, values in hashes_by_rank.items()}
        usual = Counter(hashes.values()).most_common(1)[0][0]  # of two, rank 0's
        if odd := [rank for rank, value in hashes.items() if value != usual]:
            differing.append((name, odd))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, differing)
    for several in everywhere:
        if several:
            name, odd = several[0]
            more = f" (and in {len(several) - 1} more tensors)" if len(several) > 1 else ""
            which = f"rank {', '.join(map(str, odd))} differs from the others in {name}{more}"
            why = "a device or its memory is faulty; resume without it, from the last checkpoint"
            raise ReplicasDiffer(f"step {step}: {which}: {why}")


def _hash(tensor: Tensor, device: torch.device) -> Tensor:
    mine = as_real(local(tensor.detach()))
    if not mine.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.hash_tensor(mine).view(torch.int64).to(device)
