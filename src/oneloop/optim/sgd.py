"""Fused SGD that also updates sharded parameters, for which torch's own has no rule (torch 2.15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import sgd_


class SGD(torch.optim.SGD):
    """torch's SGD, fused, on each rank's own shards: an elementwise update needs no other.

    ``found_inf``, a 0-dim tensor set before :meth:`step`, makes the step change nothing where it is 1.
    """

    elementwise = False
    """as :attr:`oneloop.optim.adamw.AdamW.elementwise`"""

    def __init__(
        self, params: Any, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True)
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            if group["momentum"]:
                for parameter in group["params"]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in params]
            if self.elementwise:
                sgd_(
                    [local(p) for p in params],
                    [local(p.grad) for p in params],
                    [local(b) for b in buffers] if group["momentum"] else None,
                    lr=group["lr"],
                    momentum=group["momentum"],
                    weight_decay=group["weight_decay"],
                    nesterov=group["nesterov"],
                    found_inf=self.found_inf,
                )
            elif params:
                sgd(
                    [local(p) for p in params],
                    [local(p.grad) for p in params],
                    [b if b is None else local(b) for b in buffers],
                    fused=True,
                    grad_scale=None,
                    found_inf=self.found_inf,
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=group["nesterov"],
                    maximize=False,
                )
