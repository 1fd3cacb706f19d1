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
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name
from oneloop.machine.old_units import SEARCH, Units, changed, froze

DEPENDS = "another parallel layout trains a different model"
"""what follows from a difference, for messages"""


class Checks:
    """Checks around each micro-batch of training.

    Args:
        model: as prepared: on one process, under DDP, or sharded by FSDP2.
        parameters: raise if a forward changes a parameter.
        buffers: raise if a forward changes a buffer.
        report: gets the name of the first changed tensor, of a parameter if there is one, where
            the run continues (None: not checked).
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
        # A forward may have removed a tensor.
        tensors = [owner.get(key) for owner, key, _ in self._owners]
        states = [None if tensor is None else self._state(tensor) for tensor in tensors]
        return tensors, states

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
    for kind in kinds:
        for prefix, module in model.named_modules():
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
