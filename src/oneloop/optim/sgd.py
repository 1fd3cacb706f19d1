"""Fused SGD that also updates sharded parameters.

torch's SGD does not support them (torch 2.15).
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import ignores_flag, sgd_


class SGD(torch.optim.SGD):
    """torch's fused SGD on each rank's shards, which is correct because the update is element-wise.

    If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes nothing.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        momentum: share of the previous update to keep.
        weight_decay: share of the parameters that is added to the gradients.
        nesterov: use Nesterov momentum.
    """

    elementwise = False  # as :attr:`oneloop.optim.adamw.AdamW.elementwise`

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True,
        )
        self.found_inf: Tensor | None = None
        self.elementwise = ignores_flag(self.param_groups)

        # Make the whole state now, so that a checkpoint can be loaded before the first step.
        for group in self.param_groups:
            if group["momentum"]:
                for parameter in group["params"]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient once."""
        for group in self.param_groups:
            # Collect this rank's shards.
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in params]
            mine = [local(p) for p in params]
            gradients = [local(p.grad) for p in params]
            kept: list[Any] = [b if b is None else local(b) for b in buffers]

            # The fused kernel is faster; element by element, sharding does not change the bits.
            if self.elementwise:
                sgd_(mine, gradients, kept, group, self.found_inf)
            elif params:
                sgd(
                    mine,
                    gradients,
                    kept,
                    lr=group["lr"],
                    momentum=group["momentum"],
                    weight_decay=group["weight_decay"],
                    nesterov=group["nesterov"],
                    dampening=0.0,
                    maximize=False,
                    fused=True,
                    grad_scale=None,
                    found_inf=self.found_inf,
                )
