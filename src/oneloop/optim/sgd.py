"""SGD of this rank's shards: fused, or element by element.

torch's fused SGD does not support sharded parameters (torch 2.15).
"""

from typing import Any

import torch
from torch import Tensor

from oneloop.optim.elementwise import ElementwiseStep, put, real_shard


class SGD(ElementwiseStep, torch.optim.SGD):
    """torch's SGD, bit-identical; the momentum is zero before the first step.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        momentum: share of the previous update to keep.
        weight_decay: share of the parameters that is added to the gradients.
        nesterov: use Nesterov momentum.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the momentum, if there is one."""
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def update_shards(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        group: dict[str, Any],
    ) -> None:
        """Update parameters and momentum."""
        momentum = group["momentum"]
        nesterov = group["nesterov"]
        decay = group["weight_decay"]
        buffers = [real_shard(state["momentum_buffer"]) for state in states if momentum]
        if not self.elementwise:
            torch._fused_sgd_(
                parameters,
                gradients,
                buffers,
                lr=group["lr"],
                momentum=momentum,
                weight_decay=decay,
                nesterov=nesterov,
                dampening=0.0,
                maximize=False,
                is_first_step=False,
                found_inf=self.found_inf,
            )
            return

        moved: list[Tensor] | tuple[Tensor, ...] = gradients
        if decay:
            moved = torch._foreach_add(gradients, parameters, alpha=decay)
        if momentum:
            new = torch._foreach_mul(buffers, momentum)
            torch._foreach_add_(new, moved)
            moved = torch._foreach_add(moved, new, alpha=momentum) if nesterov else new
            put(buffers, new, self.found_inf)
        put(parameters, torch._foreach_add(parameters, moved, alpha=-group["lr"]), self.found_inf)
