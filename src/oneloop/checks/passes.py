"""One forward and backward that trains nothing: its loss, and what identifies its gradients.

Under FSDP2, whole parameters are compared while a unit holds them, because FSDP2 drops a change of
them; and whole gradients are measured before FSDP2 sums them over the ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensor_hash import tensor_hash
from oneloop.basics.tensors import as_real, reshard, sharded_units
from oneloop.basics.wide_sums import wide_dtype
from oneloop.machine.fsdp2_units import unit_groups

_AT_ONCE = 65_536  # elements


class Wrapped(nn.Module):
    """A model as DDP presents it, without communication: it can only be called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"under DDP the model is wrapped, and has no {name!r}: call model(...), and do "
                "what you need in its forward"
            ) from None


LOSS = ""
"""name of the loss among those of gradients"""


class Measure(NamedTuple):
    """What identifies a gradient, or a loss."""

    hash: float  # of all bits
    product: float  # with fixed vectors: that of a sum is the sum of the products
    norm: float


Pass = dict[str, Measure]
"""result of one forward and backward: the loss, and gradients by parameter

Parameters that the loss does not use are missing.
"""


def run_pass(model: nn.Module, loss_of: Callable[[], Tensor]) -> Pass:
    """Run forward and backward without a sum over the ranks. Host sync.

    Under FSDP2 it is collective: call it on every rank. Gradients are None afterwards.

    Args:
        model: bare, in :class:`Wrapped`, or sharded by FSDP2.
        loss_of: runs the forward; returns the loss.

    Raises:
        Inexact: the forward changes or replaces a whole parameter of FSDP2, or a gradient is
            sparse.
    """
    measured: dict[str, Tensor] = {}

    def measure(name: str, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise Inexact(
                f"the gradient of {name} is sparse, which is not supported; set sparse=False. For "
                "a large table, use sgd with momentum 0, or torch.optim.Adagrad: they change the "
                "same rows (docs/reference/optimizers.md)"
            )
        measured[name] = _measured(gradient)

    reshard(model)
    try:
        with whole_parameters(model, measure) as units:
            loss = loss_of()
            for unit in units:
                unit.compare()
            for name, gradient in _gradients(loss, model).items():
                measure(name, gradient)
    finally:
        reshard(model)
        model.zero_grad(set_to_none=True)
    rows = torch.stack([*measured.values()]).tolist() if measured else []  # host sync
    value = float(loss.detach())
    results = {LOSS: Measure(value, value, abs(value))}
    for name, row in zip(measured, rows, strict=True):
        results[name] = Measure(*row)
    return results


def changed(name: str) -> str:
    """Return the message for a forward that changes this tensor."""
    return (
        f"a forward changes the {name} in place, so the weights would depend on the "
        "parallel layout; change it outside of the forward, or train on one process without "
        "batch.grain"
    )


def _replaced(name: str) -> Inexact:
    return Inexact(
        f"a forward in training replaces the parameter {name} by another tensor, as "
        "torch.func.functional_call does; a unit of FSDP2 uses its own parameters: set "
        "machine.blocks to classes outside of this unit, or use ddp.yaml"
    )


def _gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of trained parameters by name; none under FSDP2, which sums them.

    Bypass DDP's hooks, which would count this backward as a step's.
    """
    trained = {bare_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if isinstance(model, Wrapped):
        try:
            found = torch.autograd.grad(
                loss, [*trained.values()], allow_unused=True, retain_graph=True
            )
            pairs = zip(trained, found, strict=True)
            return {name: gradient for name, gradient in pairs if gradient is not None}
        except RuntimeError:
            pass  # reentrant checkpointing allows nothing but backward()
    loss.backward()
    if isinstance(model, FSDPModule):
        return {}
    return {name: p.grad for name, p in trained.items() if p.grad is not None}


@cache
def _weights(device: torch.device) -> Tensor:
    """Return numbers that are fixed, and without structure that a gradient may have."""
    return torch.arange(_AT_ONCE, dtype=wide_dtype(device), device=device).cos()


def _measured(gradient: Tensor) -> Tensor:
    """Return the numbers of :class:`Measure`, on the device, in its widest dtype."""
    values = as_real(gradient.detach()).reshape(-1)
    weights = _weights(values.device)
    product = torch.zeros_like(weights[0])
    squares = torch.zeros_like(product)

    # Part by part: a copy of a large gradient would need more memory than a step does.
    for number, part in enumerate(values.split(_AT_ONCE)):
        part = part.to(weights.dtype)
        product += (part @ weights[: len(part)]) * (2 + math.cos(number))
        squares += part @ part
    short = (tensor_hash(values) >> 12).to(weights.dtype)  # exact in float64
    return torch.stack([short, product, squares.sqrt()])


@contextmanager
def whole_parameters(
    model: nn.Module, see: Callable[[str, Tensor], object] | None = None
) -> Iterator[list["_Unit"]]:
    """Compare FSDP2's whole parameters in this context, as long as a unit holds them.

    Args:
        model: FSDP2 drops a change of its whole parameters, or trains it, by chance. No other
            model is compared.
        see: gets each name and whole gradient; None: compare in the first forward of each unit.

    Yields:
        The units, to compare what they still hold.

    Raises:
        Inexact: a forward changes or replaces a whole parameter.
    """
    names = {id(p): bare_name(name) for name, p in model.named_parameters()}
    units = [_Unit(unit, names, see) for unit in sharded_units(model)]
    try:
        yield units
    finally:
        for unit in units:
            unit.close()


class _Unit:
    """The parameters that FSDP2 gathers for a module, before and after its forward.

    Args:
        unit: the module.
        names: of the model's parameters, by id of the shard.
        see: gets each name and whole gradient; None: compare in the first forward only.
    """

    def __init__(
        self, unit: Any, names: dict[int, str], see: Callable[[str, Tensor], object] | None
    ) -> None:
        self._see = see
        self._held: list[tuple[str, Any]] = []  # names, and what FSDP2 knows of the parameters
        for group in unit_groups(unit):
            self._held += [(names[id(held.sharded_param)], held) for held in group.fsdp_params]
        self._before: list[tuple[Tensor, bool, int]] = []  # parameters as they were gathered
        self._hooks: dict[int, Any] = {}  # on whole parameters, by id

        # FSDP2's own hooks gather between the first two, and free after the third.
        self._closing = [
            unit.register_forward_pre_hook(self._enter, prepend=True),
            unit.register_forward_pre_hook(self._gathered),
            unit.register_forward_hook(self.compare, prepend=True),
        ]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._closing, *self._hooks.values()):
            handle.remove()

    def _enter(self, *given: object) -> None:
        """Raise Inexact if FSDP2 would put a whole parameter in place of another tensor."""
        for name, held in self._held:
            now = _now(held)
            if now is not held.sharded_param and now is not getattr(held, "_unsharded_param", None):
                raise _replaced(name)

    def _gathered(self, *given: object) -> None:
        """Record the whole parameters, and measure their gradients."""
        self._before = []
        for name, held in self._held:
            whole = _now(held)
            content = int(tensor_hash(whole))  # host sync
            self._before.append((whole, whole.requires_grad, content))
            see = self._see
            if see and whole.requires_grad and whole.is_leaf and id(whole) not in self._hooks:
                self._hooks[id(whole)] = whole.register_post_accumulate_grad_hook(
                    lambda whole, name=name, see=see: see(name, whole.grad)
                )

    def compare(self, *given: object) -> None:
        """Raise Inexact if a whole parameter is not as it was gathered, and is still held."""
        states = zip(self._held, self._before, strict=False)
        for (name, held), (whole, trained, content) in states:
            now = _now(held)
            if isinstance(now, DTensor):
                continue  # freed
            # A forward of bitsandbytes registers another object for a frozen one, with its memory.
            frozen = now is not None and not now.requires_grad and not trained
            same = now is whole or (frozen and now.data_ptr() and now.is_set_to(whole))
            if not same:
                raise _replaced(name)
            if (now.requires_grad, int(tensor_hash(now))) != (trained, content):
                raise Inexact(changed(f"parameter {name}"))
        if self._see is None:
            self.close()


def _now(held: Any) -> Any:
    """Return the tensor that a module has as one of FSDP2's parameters."""
    place = held._module_info
    return place.module._parameters.get(place.param_name)
