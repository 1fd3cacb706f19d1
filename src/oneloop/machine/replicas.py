"""Check that replicas hold equal values: faulty memory and lost updates show up here first.

>>> check_replicas(model, optimizer, step=100)           # collective; raises if they differ
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hash
from oneloop.basics.tensors import is_alone


class ReplicasDiffer(RuntimeError):
    """Two replicas hold different values of the same tensor."""


def replica_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that hold the same parameters as this rank.

    Return None if there is no other.
    """
    if is_alone():
        return None
    parameter = next(iter(model.parameters()))
    if not isinstance(parameter, DTensor):
        return dist.group.WORLD
    mesh = parameter.device_mesh
    along = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    if along and mesh.size(along[0]) > 1:
        return mesh.get_group(along[0])
    return None


def check_replicas(model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
    """Compare hashes of parameters and optimizer state between replicas.

    Collective: call on every rank. It costs one all-gather and one host sync.
    A hash covers the bits of every element, so one flipped bit always changes it.
    Pure FSDP2 and one process have no replicas: nothing is compared.

    Args:
        model: as prepared.
        optimizer: of the model.
        step: number of the step, for the message.

    Raises:
        ReplicasDiffer: on all ranks, with the rank and the tensor.
    """
    group = replica_group(model)
    if group is None:
        return

    # Gather the hashes of the replicas.
    parameters = model.named_parameters()
    named: dict[str, Tensor] = {bare_name(name): parameter for name, parameter in parameters}
    named |= optimizer_tensors(model, optimizer)
    device = next(iter(model.parameters())).device
    mine = torch.stack([tensor_hash(tensor).to(device) for tensor in named.values()])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    hashes_by_rank = dict(zip(ranks, torch.stack(gathered).tolist(), strict=True))  # host sync

    # Find the ranks that differ from the majority, tensor by tensor.
    differing: list[tuple[str, list[int]]] = []
    for index, name in enumerate(named):
        hashes = {rank: values[index] for rank, values in hashes_by_rank.items()}
        usual = Counter(hashes.values()).most_common(1)[0][0]  # in a tie, the lowest rank's
        if odd := [rank for rank, value in hashes.items() if value != usual]:
            differing.append((name, odd))

    # Tell all ranks, also those of other replica groups, so that all raise the same error.
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, differing)
    for several in everywhere:
        if several:
            name, odd = several[0]
            more = f" (and in {len(several) - 1} more tensors)" if len(several) > 1 else ""
            raise ReplicasDiffer(
                f"step {step}: rank {', '.join(map(str, odd))} differs from the others in "
                f"{name}{more}: a device or its memory is faulty; resume without it, from the last "
                "checkpoint"
            )
