"""Check in every step that its result cannot depend on the parallel layout. A failed check is
always an error.

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

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import as_real

SEARCH = "--machine.find_unused_parameters true"
# of the two hashes; sums of their squares over 4,096 ranks are exact in float64
_MODULI = (1_048_573, 1_048_571)


class Checks:
    """Checks around each micro-batch of training of a prepared ``model``.

    ``parameters``, ``buffers``: raise if a forward changes one. ``report`` gets the first changed
    tensor's name if that is no error (None: not checked). ``union`` combines flags over all ranks
    on the host, to find parameters that no rank used; these get no gradient, as on one process
    (None: all ranks must use the same parameters). ``state`` returns the value of a tensor that is
    compared."""

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
        self._report, self._union, self._state = None if buffers else report, union, state
        self.units = Units(model, state=state if parameters else None)
        self._strict = parameters
        kinds = ["_parameters"] if (parameters or report) and not self.units.parameters else []
        kinds += ["_buffers"] if buffers or report else []
        self._owners = [
            (owner, key, f"{kind[1:-1]} {bare_name(f'{prefix}.{key}'.lstrip('.'))}")
            for prefix, module in model.named_modules()
            for kind in kinds
            for owner in [getattr(module, kind)]
            for key, tensor in owner.items()
            if tensor is not None
        ]  # of each tensor: the dictionary that it is registered in, its key there, and its name
        self._trained = [
            (bare_name(name), p) for name, p in model.named_parameters() if p.requires_grad
        ]
        self._before: tuple[list[Any], list[Any]] | None = None

    def begin(self) -> None:
        """Record the state of all tensors before the forward of a micro-batch."""
        if self._before is None and self._owners:
            self._before = self._now()

    def end(self, *, last: bool = True) -> None:
        """Compare all tensors after the backward, and forget them after the ``last`` micro-batch.
        Raise Inexact if the forward changed a tensor that it must not change, or froze a
        parameter."""
        if frozen := [name for name, parameter in self._trained if not parameter.requires_grad]:
            raise Inexact(froze(frozen[0]))
        if self._before is None:
            return
        for (_, _, name), tensor, state, before, state_before in zip(
            self._owners, *self._now(), *self._before
        ):
            if tensor is before and state == state_before:
                continue
            if self._report is None or (self._strict and name.startswith("parameter")):
                raise Inexact(changed(name))
            self._report(name)
            last, self._report = True, lambda _: None  # report one tensor only
        if last:
            self._before = None

    def _now(self) -> tuple[list[Any], list[Any]]:
        tensors = [owner[key] for owner, key, _ in self._owners]
        return tensors, list(map(self._state, tensors))

    def drop_unused(self) -> None:
        """Drop FSDP2's zero gradients of parameters that no rank used. Call it after a step's last
        backward."""
        used = self.units.used
        if self._union is not None and used:
            used = self._union(used)
        for parameter, is_used in zip(self.units.parameters, used, strict=True):
            if not is_used:
                parameter.grad = None

    def hashes(self) -> list[float]:
        """Return two hashes of what this rank ran since the last call, each with its square; empty
        without FSDP2."""
        hashes = self.units.hashes(search=self._union is not None)
        return [float(number) for value in hashes for number in (value, value**2)]


class Units:
    """Records which FSDP2 units (modules gathered at once) ran in training, and which of their
    parameters were used. ``state`` returns the value that is compared before and after a unit's
    forward (None: not compared)."""

    def __init__(self, model: nn.Module, *, state: Callable[[Tensor], Any] | None = None) -> None:
        self._state = state
        self.parameters: list[nn.Parameter] = []  # the trained ones, sharded
        # whether each took part in the loss since the last :meth:`hashes`, on this rank
        self.used: list[bool] = []
        self.calls: list[str] = []  # the units that ran since then
        self.last: tuple[list[str], list[str]] = [], []
        """the input of the last :meth:`hashes`: names of units, and of unused parameters"""
        self._names: list[str] = []
        self.closing = ExitStack()  # removes the hooks
        names = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        units: list[tuple[str, Any]] = [
            (n, one) for n, one in model.named_modules() if isinstance(one, FSDPModule)
        ]
        for name, module in units:
            held, states = list[tuple[str, Any]](), list[list[Any]]()
            # once per group
            for group in (one for one in unit_groups(module) if "post_backward" not in vars(one)):
                held += (own := [(names[id(one.sharded_param)], one) for one in group.fsdp_params])
                trained = [(name, one) for name, one in own if one.sharded_param.requires_grad]
                self._names += [name for name, _ in trained]
                self.parameters += [one.sharded_param for _, one in trained]
                numbers = range(len(self.parameters) - len(trained), len(self.parameters))
                placed = [(number, one) for number, (_, one) in zip(numbers, trained, strict=True)]
                group.post_backward = partial(self._reduce, placed, group.post_backward)
                self.closing.callback(delattr, group, "post_backward")
            enter, leave = (
                partial(self._enter, bare_name(name), held, states),
                partial(self._leave, held, states),
            )
            # after FSDP2's own, which gathers
            self.closing.callback(module.register_forward_pre_hook(enter).remove)
            # before FSDP2's own
            self.closing.callback(module.register_forward_hook(leave, prepend=True).remove)
        self.used = [False] * len(self.parameters)

    def _enter(
        self, name: str, held: list[tuple[str, Any]], states: list[list[Any]], *_: object
    ) -> None:
        if torch.is_grad_enabled():
            self.calls.append(name)
            BEATS.unit = f"{len(self.calls)} ({name or 'the root'})"
            if self._state is not None:
                states.append([self._state(one._unsharded_param) for _, one in held])

    def _leave(self, held: list[tuple[str, Any]], states: list[list[Any]], *_: object) -> None:
        if self._state is not None and states:
            for (name, one), before in zip(held, states.pop(), strict=True):
                if self._state(one._unsharded_param) != before:
                    raise Inexact(changed(f"parameter {name}"))
                if one._unsharded_param.requires_grad is not one.sharded_param.requires_grad:
                    raise Inexact(froze(name))

    def _reduce(
        self, trained: list[tuple[int, Any]], post_backward: Callable[..., None], *given: Any
    ) -> None:
        """Record used parameters after a unit's backward, before FSDP2 frees the gradients."""
        for number, one in trained:
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                self.used[number] = True
        post_backward(*given)

    def hashes(self, *, search: bool) -> list[int]:
        """Hash the units that ran and, without ``search``, the unused parameters. Clear both for
        the next step."""
        if not self.parameters:
            return []
        unused = (
            []
            if search or not self.calls
            else [n for n, used in zip(self._names, self.used) if not used]
        )
        self.last = self.calls, unused
        ran = hash((*map(_number, self.calls), -1, *map(_number, unused)))
        self.calls, self.used = [], [False] * len(self.parameters)
        return [ran % modulus for modulus in _MODULI]


def agree(sums: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks ran the same; ``sums`` are their summed :meth:`Checks.hashes`.
    (Cauchy-Schwarz)"""
    return all(
        ranks * int(square) == int(total) ** 2
        for total, square in zip(sums[::2], sums[1::2], strict=True)
    )


def disagreement(ran: Sequence[tuple[list[str], list[str]]]) -> Inexact:
    """Return the error for ranks whose :attr:`Units.last` differ."""
    if units := other_units([calls for calls, _ in ran]):
        return Inexact(units)
    rank, names = next(
        (rank, unused) for rank, (_, unused) in enumerate(ran) if unused != ran[0][1] or unused
    )
    apart = (
        f"{', '.join(names[:3])} took no part in the loss of this step on rank {rank}, but did on "
        "another rank"
    )
    return Inexact(
        f"{apart}; set {SEARCH}, so that the processes compare the parameters that they used "
        "in every step"
    )


def other_units(calls: Sequence[Sequence[str]]) -> str:
    """Return the message for ranks, or samples, that run different units; empty if all run the
    same."""
    for number in range(max(map(len, calls))):
        ran = {
            (names[number] or "the root") if number < len(names) else "nothing" for names in calls
        }
        if len(ran) > 1:
            why = (
                "FSDP2 needs all processes to run the same units, and which units run depends on "
                "the samples"
            )
            ways = (
                "run every unit for every batch, set machine.blocks to them, or use ddp.yaml with "
                f"{SEARCH}"
            )
            return f"{why}: call {number + 1} of a step was {' or '.join(sorted(ran))}; {ways}"
    return ""


def changed(name: str) -> str:
    """Return the message for a forward that changes this tensor."""
    why = (
        f"a forward in training changes the {name} in place, so the weights would depend on the "
        "parallel layout"
    )
    return f"{why}; change it outside of the forward, or train on one process without batch.grain"


def froze(name: str) -> str:
    """Return the message for a forward that freezes this parameter."""
    return (
        f"{name} was frozen during training; freeze it for the whole run, in model() or by "
        "optimizer.groups"
    )


def unreduced(error: BaseException, names: Sequence[str]) -> Inexact | None:
    """Return a clear error instead of DDP's error about parameters without a gradient; None for any
    other error."""
    if not isinstance(error, RuntimeError) or "Expected to have finished reduction" not in str(
        error
    ):
        return None
    numbers = str(error).rpartition("did not receive grad for rank")[2].partition(":")[2].split()
    missing = [
        names[int(number)] for number in numbers if number.isdecimal() and int(number) < len(names)
    ]
    names = ", ".join(missing[:3]) or "a parameter"
    why = f"{names} took no part in the loss of a step, and DDP waits for its gradient"
    return Inexact(f"{why}; set {SEARCH}, or freeze it (requires_grad_(False) in model())")


def search_unused(model: nn.Module) -> bool:
    """Make FSDP2 reduce zeros for parameters that this rank did not use; return False if torch
    cannot (before 2.15)."""
    if isinstance(model, FSDPModule):
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            return False
        model.set_reduce_scatter_unused_params(True)
    return True


def content(tensor: Tensor) -> tuple[int, int]:
    """Return the version counter and a hash of a tensor; host sync."""
    mine = as_real(tensor.detach())
    known = mine.numel() and mine.is_floating_point()
    return tensor._version, int(torch.hash_tensor(mine).view(torch.int64)) if known else 0


def _number(text: str) -> int:
    """Return a number that is equal on all processes, which ``hash`` of a string is not."""
    return int.from_bytes(text.encode(), "big") % (2**61 - 1)


def unit_groups(module: Any) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of one unit."""
    state = module._get_fsdp_state()
    groups = (
        state._fsdp_param_groups
        if hasattr(state, "_fsdp_param_groups")
        else [state._fsdp_param_group]
    )
    return filter(None, groups)  # before torch 2.15: one, or None
