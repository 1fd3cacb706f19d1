"""What FSDP2's units run in training: their forwards, and how their parameters are used.

Under FSDP2 all ranks must run the same units in the same order, and use the same parameters or
search for unused ones. Otherwise FSDP2 would add gradients to those of other parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hash

SEARCH = "--machine.find_unused_parameters true"
# of the two hashes; sums of their squares over 4,096 ranks are exact in float64
_MODULI = (1_048_573, 1_048_571)


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
        self.forget()

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
        # before FSDP2's own, which gathers
        arrive = partial(self._arrive, held)
        self.closing.callback(module.register_forward_pre_hook(arrive, prepend=True).remove)
        enter = partial(self._enter, name, held, states)
        leave = partial(self._leave, held, states)
        # after it
        self.closing.callback(module.register_forward_pre_hook(enter).remove)
        # before FSDP2's own, which frees
        self.closing.callback(module.register_forward_hook(leave, prepend=True).remove)

    def _arrive(self, held: list[tuple[str, Any]], *_: object) -> None:
        """Reject a replaced parameter: FSDP2 would put its own into the module again."""
        if self._state is None:
            return
        for name, one in held:
            # FSDP2 makes the whole parameter in the first forward.
            whole = getattr(one, "_unsharded_param", one.sharded_param)
            if not (_is_registered(one, one.sharded_param) or _is_registered(one, whole)):
                raise Inexact(replaced(name))

    def _enter(
        self, name: str, held: list[tuple[str, Any]], states: list[list[Any]], *_: object
    ) -> None:
        training = torch.is_grad_enabled()
        if training:
            self.calls.append(name)
            BEATS.unit = f"{len(self.calls)} ({name or 'the root'})"
        if self._state is None:
            return

        # FSDP2 would drop a change that a forward without gradients makes, too.
        states.append([self._state(one._unsharded_param) for _, one in held])
        if training:
            for (parameter, _), state in zip(held, states[-1], strict=True):
                self._entered[parameter] = state

    def _leave(self, held: list[tuple[str, Any]], states: list[list[Any]], *_: object) -> None:
        if self._state is None or not states:
            return
        for (name, one), before in zip(held, states.pop(), strict=True):
            whole = one._unsharded_param
            if not _is_registered(one, whole):
                raise Inexact(replaced(name))
            if self._state(whole) != before:
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
            before = self._entered.pop(name, None)
            if before is None or self._state is None:
                continue
            whole = one._unsharded_param
            if whole.untyped_storage().size() and self._state(whole) != before:
                raise Inexact(changed(f"parameter {name}"))
        post_backward(*given)

    def forget(self) -> None:
        """Drop what is recorded, as after a step, or after passes that train nothing."""
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
        self.forget()
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


def changed(name: str) -> str:
    """Return the message for a forward that changes this tensor."""
    return (
        f"a forward in training changes the {name} in place, so the weights would depend on the "
        "parallel layout; change it outside of the forward, or train on one process without "
        "batch.grain"
    )


def replaced(name: str) -> str:
    """Return the message for a forward that replaces this parameter of a unit."""
    return (
        f"a forward in training replaces the parameter {name} by another tensor, as "
        "torch.func.functional_call does, but its module belongs to a unit of FSDP2, which uses "
        "its own parameters; set machine.blocks to classes outside of this unit, or use ddp.yaml"
    )


def froze(name: str) -> str:
    """Return the message for a forward that freezes this parameter."""
    return (
        f"{name} was frozen during training; freeze it for the whole run, in model() or by "
        "optimizer.groups"
    )


def content(tensor: Tensor) -> int:
    """Return a hash of a tensor's content. Host sync."""
    return int(tensor_hash(tensor))


def _is_registered(one: Any, tensor: Tensor) -> bool:
    """Return whether a tensor is what the module of an FSDP2 parameter has registered.

    A forward of bitsandbytes registers another object for a frozen parameter, which has the same
    memory, shape and strides.
    """
    info = one._module_info
    found = info.module._parameters.get(info.param_name)
    return found is tensor or (
        found is not None
        and not found.requires_grad
        and found.data_ptr() == tensor.data_ptr() != 0  # 0: a DTensor
        and found.is_set_to(tensor)
    )


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
