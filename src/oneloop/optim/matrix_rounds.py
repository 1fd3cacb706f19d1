"""Divide the matrices of an optimizer among the ranks that hold them.

A step has rounds: in each one, every rank works on at most one whole matrix.
"""

from functools import cache
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oneloop.basics.tensors import local

Round = list[Tensor | None]  # the matrix of each rank


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
    """The ranks that share the work on some matrices, and their exchanges.

    Each matrix is sharded by rows over these ranks (FSDP2), or each rank has all of it (DDP). With
    HSDP they are the ranks of one replica: each replica does the same work.

    Args:
        parameter: one of the matrices.
        replicas: ranks with replicas of a plain tensor; None: only this rank.

    Raises:
        ValueError: the matrix is sharded in another way.
    """

    def __init__(self, parameter: Tensor, replicas: dist.ProcessGroup | None = None) -> None:
        self._group = replicas
        self._sharded = False
        if isinstance(parameter, DTensor):
            self._group = None
            for dim, placement in enumerate(parameter.placements):
                if placement.is_shard(0) and self._group is None:
                    self._group = parameter.device_mesh.get_group(dim)
                    self._sharded = True
                elif not placement.is_replicate():
                    raise ValueError(
                        f"the sharding {parameter.placements} is not supported by muon; expected "
                        "dim 0 over one dimension of the mesh"
                    )
        self.ranks = self._group.size() if self._group is not None else 1
        self.rank = self._group.rank() if self._group is not None else 0

    def gathered(self, matrices: Round, tensors: Round) -> Tensor:
        """Return the whole tensor of this rank's matrix, flat; empty if it has none. Collective.

        Args:
            matrices: of a round.
            tensors: this rank's shards of a tensor for each matrix.
        """
        flat = [tensor.flatten() for tensor in tensors if tensor is not None]
        if self._sharded:
            return self._exchanged(torch.cat(flat), *self._lengths(matrices))
        own = tensors[self.rank]
        return flat[0].new_empty(0) if own is None else own.flatten()

    def scattered(self, matrices: Round, whole: Tensor) -> list[Tensor]:
        """Return this rank's shards of the results of all ranks, flat. Collective.

        Args:
            matrices: of a round.
            whole: the result of this rank, flat; empty if it has none.
        """
        if self._sharded:
            sent, received = self._lengths(matrices)
            return [*self._exchanged(whole, received, sent).split(sent)]
        parts = []
        for rank, matrix in enumerate(matrices):
            part = whole
            if matrix is not None and rank != self.rank:
                part = whole.new_empty(matrix.numel())
            if matrix is not None and self.ranks > 1:
                dist.broadcast(part, group=self._group, group_src=rank)
            parts.append(part)
        return parts

    def _lengths(self, matrices: Round) -> tuple[list[int], list[int]]:
        """Return the number of elements for each rank, and from each rank, to gather matrices."""
        sent = [0 if matrix is None else local(matrix).numel() for matrix in matrices]
        own = matrices[self.rank]
        if own is None:
            return sent, [0] * self.ranks
        rows = own.shape[0]
        most = -(-rows // self.ranks)  # rows of a shard; the last ones have fewer
        columns = own.numel() // rows
        held = [columns * min(most, max(0, rows - most * rank)) for rank in range(self.ranks)]
        return sent, held

    def _exchanged(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self._group)
        return result
