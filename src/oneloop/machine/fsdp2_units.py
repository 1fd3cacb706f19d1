"""What FSDP2's units run in training: their forwards, and which parameters the loss uses.

Under FSDP2 all ranks must run the same units in the same order, and use the same parameters or
search for unused ones. Otherwise FSDP2 would add gradients to those of other parameters.

Nothing is read from the device. To compare what they ran, the ranks add two numbers
(:meth:`Units.hashes`) to the small all-reduce that every step makes on the host. They compare them
before the step's result is accepted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from xxhash import xxh3_64_intdigest

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.parameter_names import bare_name

SEARCH = "--machine.find_unused_parameters true"
_MODULUS = 1_048_573  # of the hash; the sum of its squares over 4,096 ranks is exact in float64


class Units:
    """Records which FSDP2 units ran in training, and which of their parameters were used.

    A unit is a module whose parameters are gathered at once. Without FSDP2 there are none.

    Args:
        model: as prepared.
        union: combines flags over all ranks on the host, to find parameters that no rank used;
            these get no gradient, as on one process (None: all ranks must use the same parameters).
    """

    def __init__(
        self, model: nn.Module, *, union: Callable[[list[bool]], list[bool]] | None = None
    ) -> None:
        self._union = union
        self._parameters: dict[str, nn.Parameter] = {}  # the trained ones, sharded
        # names of those in the loss since the last :meth:`hashes`, on this rank
        self._used: set[str] = set()
        self.calls: list[str] = []  # the units that ran since then
        self.last: tuple[list[str], list[str]] = [], []
        """the input of the last :meth:`hashes`: names of units, and of unused parameters"""
        self.closing = ExitStack()  # removes the hooks

        # Add hooks to all units.
        names = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                for group in unit_groups(module):
                    if "post_backward" not in vars(group):  # units may share a group
                        self._watch_group(group, names)
                enter = partial(self._enter, bare_name(name))
                unit: Any = module
                self.closing.callback(unit.register_forward_pre_hook(enter).remove)

    def _watch_group(self, group: Any, names: dict[int, str]) -> None:
        """Record the use of a group's trained parameters."""
        trained = {}
        for held in group.fsdp_params:
            parameter = held.sharded_param
            if parameter.requires_grad:
                trained[names[id(parameter)]] = held
                self._parameters[names[id(parameter)]] = parameter
        group.post_backward = partial(self._reduce, trained, group.post_backward)
        self.closing.callback(delattr, group, "post_backward")

    def _enter(self, name: str, *_: object) -> None:
        if torch.is_grad_enabled():
            self.calls.append(name)
            BEATS.unit = f"{len(self.calls)} ({name or 'the root'})"

    def _reduce(
        self, trained: dict[str, Any], post_backward: Callable[..., None], *given: Any
    ) -> None:
        """Record used parameters after a unit's backward, before FSDP2 frees the gradients."""
        for name, held in trained.items():
            gathered = getattr(held, "_unsharded_param", None)
            if getattr(gathered, "grad", None) is not None:
                self._used.add(name)
        post_backward(*given)

    def forget(self) -> None:
        """Drop what is recorded, as after a step, or after passes that train nothing."""
        self.calls = []
        self._used = set()

    def drop_unused(self) -> None:
        """Drop FSDP2's zero gradients of parameters that no rank used.

        Collective: call on every rank, after a step's last backward.
        """
        used = [name in self._used for name in self._parameters]
        if self._union is not None and used:
            used = self._union(used)
        for parameter, is_used in zip(self._parameters.values(), used, strict=True):
            if not is_used:
                parameter.grad = None

    def hashes(self) -> list[float]:
        """Return a hash of what this rank ran, and its square.

        It covers the units that ran and, without ``union``, the unused parameters. Clear both for
        the next step.
        """
        unused = []
        if self.calls and self._union is None:
            unused = [name for name in self._parameters if name not in self._used]
        self.last = self.calls, unused
        self.forget()
        ran = xxh3_64_intdigest(repr(self.last).encode()) % _MODULUS
        return [float(ran), float(ran**2)]


def agree(sums: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks ran the same; ``sums`` are their summed :meth:`Units.hashes`."""
    # For n numbers, n * (sum of squares) >= (sum) ** 2, equal only if all are (Cauchy-Schwarz).
    # The sums are exact: the modulus keeps them below 2 ** 53 on up to 4,096 ranks.
    total, squares = sums
    return ranks * int(squares) == int(total) ** 2


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
    for number, names in enumerate(zip_longest(*calls, fillvalue="nothing"), 1):
        ran = {name or "the root" for name in names}
        if len(ran) > 1:
            return (
                "FSDP2 needs all processes to run the same units, and which units run depends on "
                f"{by}: call {number} of a step was {' or '.join(sorted(ran))}; run "
                "every unit for every batch, set machine.blocks to them, or use ddp.yaml with "
                f"{SEARCH}"
            )
    return ""


def search_unused(model: nn.Module) -> bool:
    """Make FSDP2 reduce zeros for parameters that this rank did not use.

    Return False if torch cannot (before 2.15).
    """
    if isinstance(model, FSDPModule):
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            return False
        model.set_reduce_scatter_unused_params(True)
    return True


def unit_groups(module: Any) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of one unit."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # before torch 2.15: one, or None
        groups = [state._fsdp_param_group]
    return filter(None, groups)
