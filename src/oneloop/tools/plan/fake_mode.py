"""What a step needs to run on fake tensors, which have sizes but no memory; and a shorter step."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from oneloop.data.batch_layout import BatchLayout
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.task_protocol.whole_batch import is_whole_batch
from oneloop.tools.plan.ledger import Ledger


class RealValues(TorchDispatchMode):
    """Keeps operations on real tensors real in fake mode.

    The task may read their result, since it depends on the data only. int32 tensors are real, too:
    DDP's reducer reads them. A value that an optimizer reads is 1; ``read``: it did."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self.read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        real = not any(isinstance(value, FakeTensor) or value.is_meta for value in values)
        if not values:
            real = (kwargs or {}).get("dtype") is torch.int32
        reads = func is torch.ops.aten._local_scalar_dense.default
        if reads and not real and self._ledger.now() == "update":
            self.read = True
            return 1.0
        with cast(Any, _disable_current_modes() if real else nullcontext()):
            return func(*args, **(kwargs or {}))


def empty(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake ones of the same sizes; shared ones stay shared."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            with _disable_current_modes(), mode:
                new = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)


def shortened(job: Job, run: Run) -> tuple[Job, int]:
    """Return the job with at most two micro-batches per step, and for how many the first counts.

    All of them are needed with ``batch.grain``, and for a loss over the whole batch.
    """
    layout = job.layout
    if layout.accumulate <= 2 or job.exact or is_whole_batch(job.task):
        return job, 1
    size = 2 * run.ranks * layout.each
    shorter = BatchLayout(size, run.ranks, layout.each)
    return replace(job, layout=shorter), layout.accumulate - 1
