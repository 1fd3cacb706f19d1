"""What optimizers with element-wise updates share: a step over this rank's shards.

Fused CPU kernels compute the last elements of a tensor differently, and which elements these are
depends on the length of the shard. So an optimizer here also has an update of torch's foreach
operations, bit-identical for every sharding, and to torch's foreach optimizers (2.15).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from oneloop.basics.tensors import as_real, local


def has_fused_kernels(group: dict[str, Any]) -> bool:
    """Return whether the devices of a group have fused kernels that read ``found_inf``.

    Those of an Apple GPU ignore it (pytorch #186360).
    """
    devices = {parameter.device.type for parameter in group["params"]}
    return devices <= {*_get_fused_kernels_supported_devices()} - {"mps"}


def real_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, and of a complex one both parts."""
    return as_real(local(tensor))


class ElementwiseStep(Optimizer):
    """Base class: a step updates this rank's shards.

    torch's own step sorts the tensors by device and dtype in every step, which takes longer than
    the update of a small model. Here a group may have several dtypes, but one device.

    The state is made with the optimizer, so that a checkpoint can be loaded before the first step.
    If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes nothing,
    without a host sync.
    """

    elementwise = False
    """whether to update element by element: bit-identical for every sharding, and always on devices
    without fused kernels"""
    found_inf: Tensor | None = None
    initial_state: Callable[[Tensor, dict[str, Any]], dict[str, Tensor]]
    """returns the state of a parameter of a group before its first step"""
    update_shards: Callable[..., None]
    """updates shards of parameters, unless the step is bad. Arguments: this rank's shards, of one
    dtype; their gradients; the state of each parameter; the parameter group"""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and make the state of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["fused"] = has_fused_kernels(group)
        if not group["fused"]:
            self.elementwise = True
        for parameter in group["params"]:
            self.state_of(parameter, group)

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter. Make it if there is none, as after a load without it."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter, group))
        return state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient once.

        ``closure``: computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        if any(hooks):
            Optimizer.profile_hook_step(type(self).update)(self)
        else:
            self.update()
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    """torch does not wrap it: its profiler record and hooks take 15 us in every step"""

    @torch.no_grad()
    def update(self) -> None:
        """Update all parameters that have a gradient once, without hooks."""
        for group in self.param_groups:
            self.step_group(group)

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient."""
        alike: dict[torch.dtype, list[Tensor]] = {}  # a kernel takes tensors of one dtype
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike.setdefault(parameter.dtype, []).append(parameter)
        for parameters in alike.values():
            self.update_shards(
                [real_shard(parameter) for parameter in parameters],
                [real_shard(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]
                [self.state_of(parameter, group) for parameter in parameters],
                group,
            )


def put(old: list[Tensor], new: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Copy new tensors over the old ones, unless ``found_inf`` is 1."""
    if found_inf is None:
        torch._foreach_copy_(old, [*new])
        return
    bad = found_inf > 0
    for one, other in zip(old, new, strict=True):
        torch.where(bad, one, other, out=one)
