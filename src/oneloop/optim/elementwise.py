"""What optimizers with element-wise updates share: a step over this rank's shards.

Fused CPU kernels compute the last elements of a tensor differently, and which elements these are
depends on the length of the shard. So an optimizer here also has an update of torch's foreach
operations, bit-identical for every sharding, and to torch's foreach optimizers (2.15).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oneloop.basics.tensors import local


def ignores_flag(groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether fused kernels ignore ``found_inf``: those of an Apple GPU (pytorch #186360).

    Args:
        groups: parameter groups of an optimizer.
    """
    return any(one.device.type == "mps" for group in groups for one in group["params"])


class ElementwiseStep(Optimizer):
    """Base class: a step updates this rank's shards.

    torch's own step sorts the tensors by device and dtype in every step, which takes longer than
    the update of a small model. Here a group may have several dtypes, but one device.

    The state is made with the optimizer, so that a checkpoint can be loaded before the first step.
    If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes nothing,
    without a host sync.
    """

    elementwise = False
    """whether to update element by element, not fused: bit-identical for every sharding, and always
    on an Apple GPU"""
    found_inf: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and make the state of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = self.initial_state(parameter, group)
        self.elementwise = self.elementwise or ignores_flag([group])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient once.

        ``closure``: computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient."""
        alike: dict[torch.dtype, list[Tensor]] = {}  # a kernel takes tensors of one dtype
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike.setdefault(parameter.dtype, []).append(parameter)
        for parameters in alike.values():
            self.update_shards(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
                [self.state[parameter] for parameter in parameters],
                group,
            )

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        raise NotImplementedError

    def update_shards(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        group: dict[str, Any],
    ) -> None:
        """Update parameters and state, unless the step is bad.

        Args:
            parameters: this rank's shards, of one dtype.
            gradients: of the same shapes.
            states: the state of each parameter.
            group: the parameter group.
        """
        raise NotImplementedError


def put(old: list[Tensor], new: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Copy new tensors over the old ones, unless ``found_inf`` is 1."""
    if found_inf is None:
        torch._foreach_copy_(old, [*new])
        return
    bad = found_inf > 0
    for one, other in zip(old, new, strict=True):
        torch.where(bad, one, other, out=one)
