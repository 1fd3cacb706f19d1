"""Check that replicas hold equal values: faulty memory and lost updates show up here first.

>>> check_replicas(model, optimizer, step=100)           # collective; raises if they differ
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from oneloop.basics.tensors import replica_group
from oneloop.checks.state import state_hashes


class ReplicasDiffer(RuntimeError):
    """Two replicas hold different values of the same tensor."""


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
    hashes = state_hashes(model, optimizer)
    mine = {name: number for name, number in hashes.items() if not name.startswith("buffer ")}

    # All ranks compare all groups of replicas, so that all raise the same error.
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (dist.get_process_group_ranks(group), mine))
    for ranks, _ in everywhere:
        compare_replicas({rank: everywhere[rank][1] for rank in ranks}, step=step)


def compare_replicas(replicas: Mapping[int, Mapping[str, int]], *, step: int) -> None:
    """Compare the hashes of :func:`state_hashes` of some ranks.

    Args:
        replicas: by rank.
        step: number of the step, for the message.

    Raises:
        ReplicasDiffer: with the rank that differs from the majority, and the first such tensor.
    """
    for name in next(iter(replicas.values())):
        hashes = {rank: replica.get(name) for rank, replica in replicas.items()}
        usual = Counter(hashes.values()).most_common(1)[0][0]  # in a tie, the lowest rank's
        odd = [rank for rank, value in hashes.items() if value != usual]
        if odd:
            raise ReplicasDiffer(
                f"step {step}: rank {', '.join(map(str, odd))} differs from the others in "
                f"{name.removeprefix('parameter ')}: a device or its memory is faulty; resume "
                "without it, from the last checkpoint. If this happens on other devices, too, the "
                "model changes its weights on one rank: oneloop prove --every_step"
            )
