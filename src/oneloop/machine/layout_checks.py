"""Check in every step that its result cannot depend on the parallel layout.

A failed check is always an error.

A forward must not change parameters (with ``batch.grain``, nor buffers): each process would change
its own copy. Under FSDP2 all ranks must run the same units in the same order, and use the same
parameters or search for unused ones. Otherwise FSDP2 would add gradients to those of other
parameters.

Nothing is read from the device. To compare what they ran, the ranks add four numbers
(:meth:`Checks.hashes`) to the small all-reduce that every step makes on the host. They compare them
before the step's result is accepted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hash

SEARCH = "--machine.find_unused_parameters true"
# of the two hashes; sums of their squares over 4,096 ranks are exact in float64
_MODULI = (1_048_573, 1_048_571)


class Checks:
    """Checks around each micro-batch of training.

    Args:
        model: as prepared: on one process, under DDP, or sharded by FSDP2.
        parameters: raise if a forward changes a parameter.
        buffers: raise if a forward changes a buffer.
        report: gets the first changed tensor's name if that is no error (None: not checked).
        union: combines flags over all ranks on the host, to find parameters that no rank used;
            these get no gradient, as on one process (None: all ranks must use the same parameters).
        state: returns the value of a tensor that is compared.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parameters: bool = False,
        buffers: bool = False,
        report: Callable[[str], object] | None = None,
        union: Callable[[list[bool]], list[bool]] | None = None,
        state: Callable[[Tensor], Any] = attrgetter("_version"),
    ) -> None:
        self._report = None if buffers else report
        self._union = union
        self._state = state
        self._strict = parameters
        self.units = Units(model, state=state if parameters else None)

        # Of FSDP2's parameters these are the shards. Its units compare the whole parameters.
        kinds = []
        if parameters or report:
            kinds.append("parameter")
        if buffers or report:
            kinds.append("buffer")
        self._owners = list(_registered(model, kinds))
        self._trained = [
            (bare_name(name), p) for name, p in model.named_parameters() if p.requires_grad
        ]
        # of the registered tensors: the tensors, and their states
        self._before: tuple[list[Any], list[Any]] | None = None

    def begin(self) -> None:
        """Record the state of all tensors before the forward of a micro-batch."""
        if self._before is None and self._owners:
            self._before = self._now()

    def end(self, *, last: bool = True) -> None:
        """Compare all tensors after the backward.

        Args:
            last: whether this is the step's last micro-batch, after which they are forgotten.

        Raises:
            Inexact: the forward changed a tensor that it must not change, or froze a parameter.
        """
        # Reject a frozen parameter also if nothing else is compared.
        for name, parameter in self._trained:
            if not parameter.requires_grad:
                raise Inexact(froze(name))
        if self._before is None:
            return

        # A tensor is unchanged if it is the same object in the same state.
        for (_, _, name), tensor, state, before, state_before in zip(
            self._owners, *self._now(), *self._before
        ):
            if tensor is before and state == state_before:
                continue
            if self._report is None or (self._strict and name.startswith("parameter")):
                raise Inexact(changed(name))
            self._report(name)
            self._report = lambda _: None  # report one tensor only
            last = True
        if last:
            self._before = None

    def _now(self) -> tuple[list[Any], list[Any]]:
        tensors = [owner[key] for owner, key, _ in self._owners]
        return tensors, list(map(self._state, tensors))

    def drop_unused(self) -> None:
        """Drop FSDP2's zero gradients of parameters that no rank used.

        Collective: call on every rank, after a step's last backward.
        """
        used = self.units.used
        if self._union is not None and used:
            used = self._union(used)
        for parameter, is_used in zip(self.units.parameters, used, strict=True):
            if not is_used:
                parameter.grad = None

    def hashes(self) -> list[float]:
        """Return two hashes of what this rank ran since the last call, each with its square.

        The list is empty without FSDP2.
        """
        numbers = []
        for value in self.units.hashes(search=self._union is not None):
            numbers += [float(value), float(value**2)]
        return numbers


def _registered(
    model: nn.Module, kinds: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Yield the tensors of these kinds: where each is registered, its key there, and its name."""
    for prefix, module in model.named_modules():
        for kind in kinds:
            owner = getattr(module, f"_{kind}s")
            for key, tensor in owner.items():
                if tensor is None:
                    continue
                name = bare_name(f"{prefix}.{key}".lstrip("."))
                if isinstance(tensor, DTensor):
                    # FSDP2 registers the whole parameter for a while: remember the shard.
                    yield {key: tensor.to_local()}, key, f"{kind} {name}"
                else:
                    yield owner, key, f"{kind} {name}"


class Units:
    """Records which FSDP2 units ran in training, and which of their parameters were used.

    A unit is a module whose parameters are gathered at once.

    Args:
        model: as prepared.
        state: returns the value of a parameter that is compared before and after a unit's forward
            (None: not compared).
    """

    def __init__(self, model: nn.Module, *, state: Callable[[Tensor], Any] | None = None) -> None:
        self._state = state
        self._entered: dict[
            str, Any
        ] = {}  # states of whole parameters before a unit's last forward
        self.parameters: list[nn.Parameter] = []  # the trained ones, sharded
        # whether each took part in the loss since the last :meth:`hashes`, on this rank
        self.used: list[bool] = []
        self.calls: list[str] = []  # the units that ran since then
        # gets each name and whole gradient, before it is reduced
        self.see: Callable[[str, Tensor], object] | None = None
        self.last: tuple[list[str], list[str]] = [], []
        """the input of the last :meth:`hashes`: names of units, and of unused parameters"""
        self._names: list[str] = []  # of the parameters
        self.closing = ExitStack()  # removes the hooks

        # Add hooks to all units.
        names = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                held: list[tuple[str, Any]] = []
                for group in unit_groups(module):
                    if "post_backward" not in vars(group):  # units may share a group
                        held += self._watch_group(group, names)
                self._watch_unit(module, bare_name(name), held)
        self.used = [False] * len(self.parameters)

    def closely(self, on: bool) -> None:
        """Compare contents in the next step, or only version counters. Contents: host sync."""
        if self._state is not None:
            self._state = content if on else attrgetter("_version")

    def _watch_group(self, group: Any, names: dict[int, str]) -> list[tuple[str, Any]]:
        """Record the use of a group's trained parameters; return all of them by name."""
        held = [(names[id(one.sharded_param)], one) for one in group.fsdp_params]
        trained = []
        for name, one in held:
            if one.sharded_param.requires_grad:
                trained.append((len(self.parameters), one))
                self._names.append(name)
                self.parameters.append(one.sharded_param)
        group.post_backward = partial(self._reduce, held, trained, group.post_backward)
        self.closing.callback(delattr, group, "post_backward")
        return held

    def _watch_unit(self, module: Any, name: str, held: list[tuple[str, Any]]) -> None:
        """Record the forwards of a unit, and compare its parameters before and after each."""
        states: list[list[Any]] = []  # before the forwards that are running
        enter = partial(self._enter, name, held, states)
        leave = partial(self._leave, held, states)
        # after FSDP2's own, which gathers
        self.closing.callback(module.register_forward_pre_hook(enter).remove)
        # before FSDP2's own, which frees
        self.closing.callback(module.register_forward_hook(leave, prepend=True).remove)

    def _enter(
        self, name: str, held: list[tuple[str, Any]], states: list[list[Any]], *_: object
    ) -> None:
        if torch.is_grad_enabled():
            self.calls.append(name)
            BEATS.unit = f"{len(self.calls)} ({name or 'the root'})"
            if self._state is not None:
                states.append([self._state(one._unsharded_param) for _, one in held])
                self._entered.update(zip((name for name, _ in held), states[-1], strict=True))

    def _leave(self, held: list[tuple[str, Any]], states: list[list[Any]], *_: object) -> None:
        if self._state is not None and states:
            for (name, one), before in zip(held, states.pop(), strict=True):
                whole = one._unsharded_param
                if self._state(whole) != before or not _is_registered(one, whole):
                    raise Inexact(changed(f"parameter {name}"))
                if whole.requires_grad is not one.sharded_param.requires_grad:
                    raise Inexact(froze(name))

    def _reduce(
        self,
        held: list[tuple[str, Any]],
        trained: list[tuple[int, Any]],
        post_backward: Callable[..., None],
        *given: Any,
    ) -> None:
        """Record used parameters after a unit's backward, before FSDP2 frees the gradients."""
        for number, one in trained:
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                self.used[number] = True
                if self.see is not None:
                    self.see(self._names[number], whole.grad)

        # Outside of the unit's forward (in the loss, or in a hook), FSDP2 would drop a change.
        for name, one in held:
            whole = getattr(one, "_unsharded_param", None)
            before = self._entered.pop(name, None)
            if before is None or whole is None or self._state is None:
                continue
            if whole.untyped_storage().size() and self._state(whole) != before:
                raise Inexact(changed(f"parameter {name}"))
        post_backward(*given)

    def forget(self) -> None:
        """Drop what is recorded of forwards and backwards that train nothing."""
        self.calls = []
        self.used = [False] * len(self.parameters)
        self._entered = {}

    def hashes(self, *, search: bool) -> list[int]:
        """Hash the units that ran and, without ``search``, the unused parameters.

        Clear both for the next step.
        """
        if not self.parameters:
            return []
        unused = []
        if self.calls and not search:
            unused = [name for name, used in zip(self._names, self.used) if not used]
        self.last = self.calls, unused
        ran = hash((*map(_number, self.calls), -1, *map(_number, unused)))
        self.calls = []
        self.used = [False] * len(self.parameters)
        return [ran % modulus for modulus in _MODULI]


def agree(sums: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks ran the same; ``sums`` are their summed :meth:`Checks.hashes`."""
    # For n numbers, n * (sum of squares) >= (sum) ** 2, equal only if all are (Cauchy-Schwarz).
    # The sums are exact: the moduli keep them below 2 ** 53 on up to 4,096 ranks.
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(ranks * int(squares) == int(total) ** 2 for total, squares in pairs)


def disagreement(ran: Sequence[tuple[list[str], list[str]]]) -> Inexact:
    """Return the error for ranks whose :attr:`Units.last` differ."""
    units = other_units([calls for calls, _ in ran], by="the samples or on random numbers")
    if units:
        return Inexact(units)
    rank, names = next((rank, unused) for rank, (_, unused) in enumerate(ran) if unused)
    return Inexact(
        f"{', '.join(names[:3])} took no part in the loss of this step on rank {rank}, but did on "
        f"another rank; set {SEARCH}, so that the processes compare the parameters that they used "
        "in every step"
    )


def other_units(calls: Sequence[Sequence[str]], *, by: str = "the samples") -> str:
    """Return the message for ranks, or samples, that run different units.

    Return an empty text if all run the same.

    Args:
        calls: of each rank or sample, the names of the units in the order in which they ran.
        by: on what they depend.
    """
    # Find the first call that differs.
    for number in range(max(map(len, calls))):
        ran = set()
        for names in calls:
            if number < len(names):
                ran.add(names[number] or "the root")
            else:
                ran.add("nothing")
        if len(ran) > 1:
            return (
                "FSDP2 needs all processes to run the same units, and which units run depends on "
                f"{by}: call {number + 1} of a step was {' or '.join(sorted(ran))}; run "
                "every unit for every batch, set machine.blocks to them, or use ddp.yaml with "
                f"{SEARCH}"
            )
    return ""


def _is_registered(one: Any, whole: Tensor) -> bool:
    """Return whether a whole FSDP2 parameter is still that of its module."""
    info = one._module_info
    return info.module._parameters.get(info.param_name) is whole


def changed(name: str) -> str:
    """Return the message for a forward that changes this tensor."""
    return (
        f"a forward in training changes the {name} in place, so the weights would depend on the "
        "parallel layout; change it outside of the forward, or train on one process without "
        "batch.grain"
    )


def froze(name: str) -> str:
    """Return the message for a forward that freezes this parameter."""
    return (
        f"{name} was frozen during training; freeze it for the whole run, in model() or by "
        "optimizer.groups"
    )


def unreduced(error: BaseException, names: Sequence[str]) -> Inexact | None:
    """Return a clear error instead of DDP's error about parameters without a gradient.

    Return None for any other error.

    Args:
        error: which a step raised.
        names: of the trained parameters, in DDP's order.
    """
    if not isinstance(error, RuntimeError):
        return None  # such an error may not even be printable
    text = str(error)
    if "Expected to have finished reduction" not in text:
        return None

    # DDP lists the parameters by number.
    missing = []
    for number in text.rpartition("did not receive grad for rank")[2].partition(":")[2].split():
        if number.isdecimal() and int(number) < len(names):
            missing.append(names[int(number)])
    known = ", ".join(missing[:3]) or "a parameter"
    return Inexact(
        f"{known} took no part in the loss of a step, and DDP waits for its gradient; set "
        f"{SEARCH}, or freeze it (requires_grad_(False) in model())"
    )


def search_unused(model: nn.Module) -> bool:
    """Make FSDP2 reduce zeros for parameters that this rank did not use.

    Return False if torch cannot (before 2.15).
    """
    if isinstance(model, FSDPModule):
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            return False
        model.set_reduce_scatter_unused_params(True)
    return True


def content(tensor: Tensor) -> int:
    """Return a hash of a tensor's content. Host sync."""
    return int(tensor_hash(tensor))


def _number(text: str) -> int:
    """Return a number that is equal on all processes, which ``hash`` of a string is not."""
    return int.from_bytes(text.encode(), "big") % (2**61 - 1)


def unit_groups(module: Any) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of one unit."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # before torch 2.15: one, or None
        groups = [state._fsdp_param_group]
    return filter(None, groups)
