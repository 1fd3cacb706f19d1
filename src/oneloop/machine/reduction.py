"""How the gradients of a step come together: as they come, or in one fixed tree over the leaves of the batch.

>>> reduction = Tree(model, parameters, ranks=2, rank=0, accumulate=4)
>>> for batch in group:                                   # a leaf each
...     with accelerator.accumulate(model):
...         accelerator.backward(loss(batch) * reduction.factor / weight)
...     reduction.leaf()                                  # with the last one .grad is their sum

A leaf is a micro-batch of the same samples however a batch is split. On a process a binary counter adds them; between
processes an all-to-all gives each its piece of all leaves, which it adds in the same tree. Which leaf stands where:
whole gradients are exchanged once a step, so that a process has neighbouring leaves; FSDP2 reduces at every
micro-batch, so that neighbours stand on neighbouring processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.tensors import local


class Reduction:
    """Gradients as autograd, DDP and FSDP2 add them.

    Args:
        ranks: processes that share a step.
        accumulate: micro-batches of a step on each.
    """

    def __init__(self, ranks: int, accumulate: int) -> None:
        self.factor = ranks * accumulate
        """of the loss: undoes DDP's mean and accelerate's"""

    def leaf(self) -> None:
        """One micro-batch's backward is done."""


class Tree(Reduction):
    """Gradients in one fixed binary tree over the leaves of a step: the same bits for any number of processes.

    Args:
        model: as prepared: on one process, under DDP, or sharded by FSDP2 over one dimension.
        parameters: those that are trained.
        ranks: processes, a power of two.
        accumulate: leaves of each, a power of two.
        see: is shown a leaf's gradients under FSDP2, before they are summed.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        ranks: int,
        accumulate: int,
        see: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        super().__init__(1, accumulate)  # sums, no means
        self._parameters, self._place = parameters, {id(p): place for place, p in enumerate(parameters)}
        self._ranks, self._accumulate = ranks, accumulate
        self._leaves = 0
        """of this step, on this process"""
        self._sums: list[tuple[int, list[Tensor | None]]] = []
        """of 2^level leaves each, the largest first"""
        self._under_way: list[tuple[Any, Tensor, Tensor, torch.futures.Future[Tensor]]] = []
        self._replicated = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self, lambda tree, bucket: tree._exchange(bucket))  # it reads annotations
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Scatter(see))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def leaf(self) -> None:
        """Takes the gradients of one leaf away; with the step's last one, ``.grad`` are the sums of all."""
        self._leaves += 1
        if self._leaves == self._accumulate:
            if not self._replicated:  # else done, bucket by bucket
                sums = self._add_up([parameter.grad for parameter in self._parameters], self._parameters)
                for parameter, gradient in zip(self._parameters, sums, strict=True):
                    parameter.grad = gradient
            self._leaves, self._sums = 0, []
            return
        level, mine = 0, [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None  # else the next backward would add to it
        while self._sums and self._sums[-1][0] == level:
            mine, level = _added(self._sums.pop()[1], mine), level + 1
        self._sums.append((level, mine))

    def _add_up(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Adds to the last leaf's gradients of these parameters, in place, what stands before it in the tree."""
        places = [self._place[id(parameter)] for parameter in parameters]
        for _, earlier in reversed(self._sums):
            gradients = _added(gradients, [earlier[place] for place in places])
        return gradients

    def _exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's hook, bucket by bucket while the last leaf's backward goes on: each rank gets its piece of all ranks'
        sums, adds them in the tree, and all gather the pieces. What a ring moves."""
        with torch.no_grad():
            self._add_up(bucket.gradients(), bucket.parameters())
            buffer = bucket.buffer()
            pieces = torch.nn.functional.pad(buffer, (0, -buffer.numel() % self._ranks))
            theirs = torch.empty_like(pieces)
            work = dist.all_to_all_single(theirs, pieces, async_op=True)
            future: torch.futures.Future[Tensor] = torch.futures.Future(
                devices=[] if buffer.device.type == "cpu" else [buffer.device]
            )
            self._under_way.append((work, theirs, buffer, future))
            while len(self._under_way) > (0 if bucket.is_last() else 1):  # in one order on all ranks
                self._gather(*self._under_way.pop(0))
        return future

    def _gather(self, work: Any, theirs: Tensor, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        work.wait()
        dist.all_gather_into_tensor(theirs, tree_sum(theirs.view(self._ranks, -1)))
        future.set_result(buffer.copy_(theirs[: buffer.numel()]))


def _added(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sums, in the memory of the first. Where one of two has no gradient, it is zero."""
    both = [(a, b) for a, b in zip(some, others, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([local(a) for a, _ in both], [local(b) for _, b in both])
    alone = [a if b is None else b for a, b in zip(some, others, strict=True) if (a is None) is not (b is None)]
    for one in alone:
        local(one).add_(0.0)  # type: ignore[arg-type]  # minus zero is then what it is in a sum
    return [b if a is None else a for a, b in zip(some, others, strict=True)]


class _Scatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, in the tree over the ranks."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._see(input_tensor)
        theirs = torch.empty_like(input_tensor)
        dist.all_to_all_single(theirs, input_tensor, group=group)
        output_tensor.copy_(tree_sum(theirs.view(group.size(), -1)))
        return None
