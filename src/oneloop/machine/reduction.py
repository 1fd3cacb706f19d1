"""How the gradients of a step are summed: as torch adds them, or in one fixed tree.

>>> reduction = Tree(model, parameters, ranks=2, accumulate=4)
>>> for batch in group:                                   # one leaf each
...     with accelerator.accumulate(model), reduction:    # after the last one, .grad is their sum
...         accelerator.backward(loss(batch) * reduction.factor / weight)

A leaf is a micro-batch that holds the same samples under every parallel layout. On one process a
binary counter adds the leaves. Between processes, an all-to-all gives each process its piece of all
gradients, which it adds in the same tree. With one exchange per step (DDP), a process holds
neighbouring leaves. FSDP2 reduces in every micro-batch, so neighbouring leaves are on neighbouring
processes.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.exit_codes import Inexact
from oneloop.basics.tensors import dense, local, sharded_units
from oneloop.machine.fsdp2_units import SEARCH, Units


class Reduction:
    """Gradient sums of autograd, DDP and FSDP2.

    It is a context around forward and backward of each micro-batch. DDP and FSDP2 are set to sum
    over ranks instead of averaging. So autograd sees the same loss under every parallel layout,
    which matters if a backward is not linear (for example, a hook that clamps gradients).

    Args:
        model: as prepared: on one process, under DDP, or sharded by FSDP2.
        accumulate: micro-batches per step on each process.
        units: FSDP2's, of which the gradients of unused parameters are dropped.
    """

    def __init__(self, model: nn.Module, *, accumulate: int, units: Units | None = None) -> None:
        # factor of the loss, which undoes accelerate's mean over the micro-batches
        self.factor = accumulate
        self._accumulate = accumulate
        self._leaves = 0  # of this step, so far
        self._used = units

        # Let DDP and FSDP2 sum, and not average.
        self._replicated = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            # torch reads annotations
            model.register_comm_hook(self, lambda own, bucket: own._exchange(bucket))
        self._units = sharded_units(model)
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def __enter__(self) -> None:
        """Prepare for the gradients of one micro-batch."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and "finished reduction" in str(error):
            # DDP's own error lists the parameters by number.
            raise Inexact(
                "a parameter took no part in the loss of a step, and DDP waits for its gradient; "
                f"set {SEARCH}, or freeze it (requires_grad_(False) in model())"
            ) from error
        if error is not None:
            return

        # Count the micro-batch, and take its gradients.
        self._leaves = (self._leaves + 1) % self._accumulate
        last = not self._leaves
        self._take(last=last)
        if last and self._used is not None:
            self._used.drop_unused()

    def _take(self, *, last: bool) -> None:
        """Process the gradients of one micro-batch."""

    def _exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum a bucket over the ranks (DDP communication hook)."""
        buffer = bucket.buffer()
        # its value() raises if the collective failed
        summed = dist.all_reduce(buffer, async_op=True).get_future()
        return cast(
            "torch.futures.Future[Tensor]", summed.then(lambda done: (done.value(), buffer)[1])
        )


class Tree(Reduction):
    """Gradient sums in one fixed binary tree over the leaves of a step.

    They are bit-identical on any number of processes.

    Args:
        model: as for :class:`Reduction`; under FSDP2, it is sharded over one dimension.
        parameters: the trained ones.
        ranks: number of processes, a power of two.
        accumulate: leaves per step on each process, a power of two.
        units: FSDP2's, of which the gradients of unused parameters are dropped.
        see: called under FSDP2 with the gradients of a leaf before they are summed.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        ranks: int,
        accumulate: int,
        units: Units | None = None,
        see: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        super().__init__(model, accumulate=accumulate, units=units)
        self._parameters = parameters
        self._index = {id(p): index for index, p in enumerate(parameters)}
        self._ranks = ranks
        # sums of 2^level leaves, the largest first
        self._sums: list[list[Tensor | None]] = []
        # (collective, received pieces, bucket, result) of each bucket that is not yet gathered
        self._in_flight: list[tuple[Any, Tensor, Tensor, torch.futures.Future[Tensor]]] = []
        self._searching = bool(getattr(model, "find_unused_parameters", False))
        for unit in self._units:
            unit.set_custom_reduce_scatter(_Scatter(see))

    def __enter__(self) -> None:
        # FSDP2 must reduce each leaf. On one process, accelerate would let it keep their sum.
        for unit in self._units:
            unit.set_requires_gradient_sync(True, recurse=False)

    @torch.no_grad()
    def _take(self, *, last: bool) -> None:
        """Move the gradients of one leaf into the tree.

        After the last leaf, ``.grad`` holds the sums of all leaves.
        """
        # Count in binary: two sums of 2^level leaves make one of 2^(level + 1). Under DDP, the hook
        # adds the last leaf, bucket by bucket.
        gradients = [parameter.grad for parameter in self._parameters]
        if not (last and self._replicated):
            leaf = (self._leaves - 1) % self._accumulate
            while leaf & 1:
                gradients = _added(gradients, self._sums.pop())
                leaf >>= 1
            self._sums.append(gradients)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient if last else None  # else the next backward would add to it

        if last:
            self._sums = []
            # -0.0 becomes 0.0: the sign would depend on whether a leaf has a zero gradient or none.
            if present := [local(gradient) for gradient in gradients if gradient is not None]:
                torch._foreach_add_(present, 0.0)
        elif self._searching and self._leaves == self._accumulate - 1:
            # In the last leaf, DDP must treat a parameter as used if an earlier leaf used it.
            for parameter, *sums in zip(self._parameters, *self._sums, strict=True):
                if any(gradient is not None for gradient in sums):
                    parameter.grad = torch.zeros_like(parameter)

    def _exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum a bucket over the ranks in the tree (DDP communication hook).

        It runs during the last leaf's backward. Each rank adds its piece of all ranks' sums; then
        all gather the pieces (the bytes of a ring all-reduce).
        """
        with torch.no_grad():
            # Add the earlier leaves to views of the bucket, in the parameters' strides.
            buffer = bucket.buffer()
            mine = bucket.parameters()
            views = []
            for parameter, view in zip(mine, bucket.gradients(), strict=True):
                if dense(parameter):
                    start = view.storage_offset()
                    view = buffer.as_strided(parameter.size(), parameter.stride(), start)
                views.append(view)
            indices = [self._index[id(parameter)] for parameter in mine]
            for earlier in reversed(self._sums):
                _added(views, [earlier[index] for index in indices])

            # Start to exchange the pieces, and gather those of the bucket before.
            pieces = torch.nn.functional.pad(buffer, (0, -buffer.numel() % self._ranks))
            received = torch.empty_like(pieces)
            work = dist.all_to_all_single(received, pieces, async_op=True)
            future: torch.futures.Future[Tensor] = torch.futures.Future(
                devices=[] if buffer.device.type == "cpu" else [buffer.device]
            )
            self._in_flight.append((work, received, buffer, future))
            # in the same order on all ranks
            while len(self._in_flight) > (0 if bucket.is_last() else 1):
                self._gather(*self._in_flight.pop(0))
        return future

    def _gather(
        self, work: Any, received: Tensor, buffer: Tensor, future: torch.futures.Future[Tensor]
    ) -> None:
        work.wait()
        dist.all_gather_into_tensor(received, tree_sum(received.view(self._ranks, -1)))
        future.set_result(buffer.copy_(received[: buffer.numel()]))


def _added(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the element-wise sums, in the memory of the first argument.

    A missing gradient counts as zero.
    """
    pairs = [*zip(some, others, strict=True)]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if both:
        torch._foreach_add_([local(one) for one, _ in both], [local(other) for _, other in both])
    return [other if one is None else one for one, other in pairs]


class _Scatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, summed in the tree over the ranks."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._see(input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1)))
        return None
