"""Count the memory, collectives and floating-point operations of code, on real or fake tensors.

>>> with Ledger() as ledger, ledger.stage("forward"):
...     model(batch)
>>> ledger.peak                                   # bytes of all tensors that were alive at once
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from oneloop.measure.flops import FORMULAS

BACKWARD = "backward"
RECOMPUTE = "recompute"
COMMUNICATION = "communication buffers"
_FORMULAS = flop_registry | FORMULAS

# Namespaces of torch's own operators. Others may allocate what no tensor shows.
_OWN = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp"}

# Parts of the names of operators, and the collective operation that they stand for.
_NAMES = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
}


@dataclass(frozen=True, order=True)
class Calls:
    """One collective operation of this rank, or equal ones of one step."""

    name: str  # all-gather, reduce-scatter, all-reduce, all-to-all, broadcast …
    # bytes of the whole tensor: the result of an all-gather, the input of a reduce-scatter
    size: int
    ranks: int  # size of its process group
    calls: int
    wire: float  # bytes that one process sends in all calls


@dataclass
class PeakMemory:
    """The moment at which a step needs most memory."""

    peak: int  # bytes
    # bytes at the peak by the owner of a tensor, else by the stage that allocated it
    kinds: dict[str, int]
    stage: str  # forward, backward, update, …
    module: str  # its name in the model; empty: the model itself
    operator: str


@dataclass
class Costs(PeakMemory):
    """What a step takes, or two micro-batches of the evaluation."""

    collectives: list[Calls]
    operations: dict[str, float]  # floating-point operations by stage


@dataclass
class _Block:
    alive: Any  # weak reference to the storage
    size: int
    kind: str  # the stage that allocated it, or what it was found to be


class Ledger(TorchDispatchMode):
    """Counts every operation in its context.

    A stage is a name for a part of the step; within the backward pass it is ``backward``, or
    ``recompute`` for activation checkpointing's second forward.

    Storages are counted with the bytes of their tensors, without the allocator's rounding and
    reserve."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Bytes and events since :meth:`looking` began; an event is an operation.
        self.size = 0  # of all storages that are alive
        self.peak = 0
        self.events = 0
        self.peak_event = 0  # number of the event at which the peak was reached
        self.operator = ""  # of the last event
        self.collectives: list[Calls] = []
        self.operations: Counter[str] = Counter()  # floating-point operations by stage
        self.foreign: set[str] = set()  # names of operators that are not torch's own

        self._live: dict[int, _Block] = {}  # by the storage's address
        self._stage = "setup"
        self._look_at = 0  # number of the event after which to call ``_look``
        self._look: Callable[[Ledger], None] = lambda _: None
        self._resize = torch.UntypedStorage.resize_

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name the current part of the step in this context."""
        before = self._stage
        self._stage = name
        try:
            yield
        finally:
            self._stage = before

    @contextmanager
    def looking(
        self, at: int = 0, then: Callable[["Ledger"], None] = lambda _: None
    ) -> Iterator[None]:
        """Reset the peak and the counts.

        In this context, call ``then`` after the event of the number ``at``."""
        self.peak = self.size
        self.events = 0
        self.peak_event = 0
        self.collectives = []
        self.operations = Counter()
        self._look_at = at
        self._look = then
        try:
            yield
        finally:
            self._look_at = 0

    def now(self) -> str:
        """Return the current stage."""
        if torch._C._current_graph_task_id() == -1:
            return self._stage
        return RECOMPUTE if torch.is_grad_enabled() else BACKWARD

    def settle(self, kind: str) -> None:
        """Set the kind of all blocks that a backward pass has left."""
        for block in self._live.values():
            if block.kind in (BACKWARD, RECOMPUTE):
                block.kind = kind

    def __enter__(self) -> "Ledger":
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.see(storage)
            self._event("resize")
            return result

        # FSDP2 frees and allocates gathered parameters by resizing, which is no operator.
        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on shards come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        # Count what it allocated; a view allocates nothing.
        values = [result] if isinstance(result, Tensor) else tree_leaves(result)
        for value in values:
            if isinstance(value, Tensor):
                self.see(value.untyped_storage())
        if func is torch.ops.torch_attn._varlen_attn_backward.default:
            hidden = torch.empty(_hidden(*args), dtype=torch.uint8, device="meta")
            self.see(hidden.untyped_storage())  # until the end of this function
        if func.is_view or func.namespace in ("prim", "profiler"):
            return result

        if func.namespace not in _OWN:
            self.foreign.add(func.name())

        # Count what it sent and computed.
        if func in collective_ops and func not in sync_ops:
            self._communicated(func, result, args, kwargs)
        else:
            formula = _FORMULAS.get(func._overloadpacket)
            if formula is not None:
                self.operations[self.now()] += int(formula(*args, **kwargs, out_val=result))
        self._event(str(func))
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        number = storage._cdata
        size = storage.nbytes()
        block = self._live.get(number)
        if block is not None:
            if block.size != size:
                self.size += size - block.size
                block.size = size
                if size:  # allocated again, in this stage
                    block.kind = self.now()
            return

        def freed(_: Any) -> None:
            gone = self._live.pop(number, None)
            if gone is not None:
                self.size -= gone.size

        self._live[number] = _Block(weakref.ref(storage, freed), size, self.now())
        self.size += size

    def _event(self, operator: str) -> None:
        self.events += 1
        self.operator = operator
        if self.size > self.peak:
            self.peak = self.size
            self.peak_event = self.events
        if self.events == self._look_at:
            self._look(self)

    def classify(self, owners: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Return the bytes that are alive now, by kind."""
        kinds: dict[int, str] = {}
        for kind, tensors in owners.items():
            for storage in storages(tensors):
                kinds.setdefault(storage._cdata, kind)  # of two owners, the first one counts
        sizes: Counter[str] = Counter()
        for number, block in self._live.items():
            sizes[kinds.get(number, block.kind)] += block.size
        return {kind: size for kind, size in sizes.items() if size}

    def _communicated(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        words = func._overloadpacket.__name__
        name = words.strip("_")
        for part, known in _NAMES.items():
            if part in words:
                name = known
                break
        group = CollectiveOp.get_process_group(func, args)
        size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
        ranks = group.size()
        # In a ring, a rank sends (n - 1) / n of the size; for an all-reduce, twice that.
        times = 2 if name == "all-reduce" else 1
        wire = size * (ranks - 1) / ranks * times
        self.collectives.append(Calls(name, size, ranks, 1, wire))

        # FSDP2 copies parameters and gradients into buffers for these.
        if name in ("all-gather", "reduce-scatter"):
            for storage in storages(tree_leaves(args)):
                block = self._live.get(storage._cdata)
                if block is not None:
                    block.kind = COMMUNICATION


def _hidden(slope: Tensor, query: Tensor, key: Tensor, *given: Any) -> int:
    """Return the bytes that the backward of attention in packed rows allocates for itself.

    These are the sums of the query's gradient in float32, with 128 more rows for each document, and
    the gradients of keys and values for each head of the query (FlashAttention 2 in torch).
    """
    tokens, heads, width = query.shape
    documents = len(given[3]) - 1
    rows = tokens + 128 * documents
    sums = 4 * rows * heads * (-(-width // 32) * 32 + 1)
    if key.shape[1] == heads:
        return int(sums)
    return int(sums) + 2 * query.element_size() * len(key) * heads * width


def storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of this rank's parts of tensors; skip everything else."""
    for tensor in tensors:
        mine = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(mine, Tensor):
            yield mine.untyped_storage()


@contextmanager
def module_names(model: nn.Module, entered: list[str]) -> Iterator[None]:
    """Append to ``entered`` the name of each module that runs, forwards or backwards."""

    def leave(name: str, *given: Any) -> None:
        for tensor in tree_leaves(given[-1]):
            node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
            # A mark says that an inner module returned the tensor, too.
            if node is not None and "oneloop" not in node.metadata:
                node.metadata["oneloop"] = True
                node.register_prehook(lambda _: entered.append(name))
        entered.append(name.rpartition(".")[0])

    with ExitStack() as stack:
        for name, module in model.named_modules():
            name = name.removeprefix("module.")
            enter = partial(lambda name, *_: entered.append(name), name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        yield
