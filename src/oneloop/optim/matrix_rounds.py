"""Divide the matrices of an optimizer among the ranks that hold them.

A step has rounds: in each one, every rank works on at most one whole matrix.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@cache
def rounds(costs: tuple[int, ...], ranks: int) -> list[tuple[int | None, ...]]:
    """Return, for each round, the index of each rank's matrix (None: it has no matrix).

    The most expensive matrices come first, each on the rank with the least work so far. So every
    rank gets the same answer.

    Args:
        costs: cost of each matrix.
        ranks: number of ranks.
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        rank = work.index(min(work))
        queues[rank].append(index)
        work[rank] += costs[index]
    return list(zip_longest(*queues))


class Holders:
    """The ranks that hold a matrix, and their exchanges.

    Each replica of the matrix is on one rank, or is sharded by rows over several ranks.

    Args:
        parameter: the matrix.
        group: ranks with replicas of a plain tensor; None: only this rank.

    Raises:
        ValueError: the matrix is sharded in another way.
    """

    def __init__(self, parameter: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self._replicas = group
        self._shards: dist.ProcessGroup | None = None
        if isinstance(parameter, DTensor):
            self._replicas = None
            for dim, placement in enumerate(parameter.placements):
                along = parameter.device_mesh.get_group(dim)
                if placement.is_shard(0) and self._shards is None:
                    self._shards = along
                elif placement.is_replicate() and self._replicas is None:
                    self._replicas = along
                else:
                    raise ValueError(
                        f"the sharding {parameter.placements} is not supported by muon; expected "
                        "dim 0 over one dimension of the mesh, and at most one of replicas"
                    )

        # The numbers of ranks, and this rank's place among them.
        self.replicas, self.replica = _size_and_rank(self._replicas)
        self.shards, self.shard = _size_and_rank(self._shards)

    def shard_lengths(self, shape: Sequence[int]) -> list[int]:
        """Return the number of elements of each shard of a matrix."""
        rows = shape[0]
        most = -(-rows // self.shards)  # rows of a shard; the last ones have fewer
        each = math.prod(shape[1:])
        return [each * min(most, max(0, rows - most * rank)) for rank in range(self.shards)]

    def exchanged(self, parts: list[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Send a part to each shard's rank, and return their parts, flat.

        Collective among the shards of a replica.

        Args:
            parts: one after the other.
            sent: number of elements for each rank.
            received: number of elements from each rank.
        """
        if self.shards == 1:
            return parts[0].flatten()
        flat = torch.cat([part.flatten() for part in parts])
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self._shards)
        return result

    def share(self, flat: Tensor, replica: int) -> None:
        """Copy one replica's tensor to the other replicas, in place. Collective among them."""
        if self.replicas > 1:
            dist.broadcast(flat, group=self._replicas, group_src=replica)


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())
