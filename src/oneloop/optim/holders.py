"""The ranks that hold a matrix, and how they exchange it.

A step of Muon has rounds: in each one, every rank works on at most one whole matrix.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oneloop.basics.tensors import local


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

    def gathered(self, matrices: list[Tensor], shards: list[Tensor]) -> Tensor:
        """Return the whole tensor of this rank's matrix, flat; empty if it has none. Collective.

        Args:
            matrices: of a round: the first one is of rank 0.
            shards: this rank's shards of a tensor for each matrix.
        """
        if self._sharded:
            flat = torch.cat([shard.flatten() for shard in shards])
            return self._exchanged(flat, *self._lengths(matrices))
        own = shards[self.rank : self.rank + 1]
        return own[0].flatten() if own else shards[0].new_empty(0)

    def scattered(self, matrices: list[Tensor], whole: Tensor) -> list[Tensor]:
        """Return this rank's shards of the results of all ranks, flat. Collective.

        Args:
            matrices: of a round.
            whole: the result of this rank, flat; empty if it has none.
        """
        if self._sharded:
            sent, received = self._lengths(matrices)
            parts = self._exchanged(whole, received, sent).split(sent)
            return [*parts[: len(matrices)]]
        results = []
        for rank, matrix in enumerate(matrices):
            result = whole if rank == self.rank else whole.new_empty(matrix.numel())
            if self._group is not None:
                dist.broadcast(result, group=self._group, group_src=rank)
            results.append(result)
        return results

    def _lengths(self, matrices: list[Tensor]) -> tuple[list[int], list[int]]:
        """Return the number of elements for each rank, and from each rank, to gather matrices."""
        sent = [local(matrix).numel() for matrix in matrices]
        sent += [0] * (self.ranks - len(matrices))
        if self.rank >= len(matrices):
            return sent, [0] * self.ranks
        rows = matrices[self.rank].shape[0]
        most = -(-rows // self.ranks)  # rows of a shard; the last ones have fewer
        columns = matrices[self.rank].numel() // rows
        held = []
        for rank in range(self.ranks):
            rows_of_rank = min(most, max(0, rows - most * rank))
            held.append(columns * rows_of_rank)
        return sent, held

    def _exchanged(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self._group)
        return result
