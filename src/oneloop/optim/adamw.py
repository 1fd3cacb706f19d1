"""AdamW of this rank's shards: fused, or element by element."""

import math
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.tensors import local
from oneloop.basics.wide_sums import wide_dtype
from oneloop.optim.elementwise import ElementwiseStep, put, real_shard


class AdamWStep(ElementwiseStep):
    """Base class of :class:`AdamW`, and of Muon, which updates some of its parameters so."""

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zeros, as torch does."""
        return {
            "step": local(parameter).new_zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def update_shards(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        group: dict[str, Any],
    ) -> None:
        """Update parameters and moments.

        Of the group, it reads ``lr``, ``betas`` (decay rates of the moments, per step), ``eps``
        (added to the root of the second moment) and ``weight_decay`` (factor of ``lr``)."""
        lr = group["lr"]
        eps = group["eps"]
        decay = group["weight_decay"]
        beta1, beta2 = group["betas"]
        exp_avgs = [real_shard(state["exp_avg"]) for state in states]
        exp_avg_sqs = [real_shard(state["exp_avg_sq"]) for state in states]
        steps = [state["step"] for state in states]
        counted = 1 if self.found_inf is None else 1 - self.found_inf  # a bad step is not

        # The fused kernel reads the flag itself, without a host sync.
        if not self.elementwise:
            added: Any = 1 if self.found_inf is None else [counted] * len(steps)
            torch._foreach_add_(steps, added)
            torch._fused_adamw_(
                parameters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )
            return

        # Count the step, and update the moments.
        numbers = torch.stack(steps) + counted
        first = torch._foreach_lerp(exp_avgs, gradients, 1 - beta1)
        second = torch._foreach_mul(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)

        # Calculate the bias corrections of all parameters at once.
        at_least_one = numbers.clamp(min=1)  # no division by zero if the first step is bad
        size = (-lr / _correction(beta1, at_least_one)).to(first[0].dtype)
        root = _correction(beta2, at_least_one).sqrt().to(first[0].dtype)

        # Divide the first moments by the roots of the second ones.
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, root.unbind())
        torch._foreach_add_(below, eps)
        moved = torch._foreach_mul(first, size.unbind())
        torch._foreach_div_(moved, below)

        # Decay and move the parameters. Write the results, unless the step is bad.
        new = torch._foreach_mul(parameters, 1 - lr * decay)
        torch._foreach_add_(new, moved)
        torch._foreach_copy_(steps, numbers.unbind())
        put(exp_avgs, first, self.found_inf)
        put(exp_avg_sqs, second, self.found_inf)
        put(parameters, new, self.found_inf)


def _correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta ** steps in float64, or rounded to float32 if the device has no float64."""
    if wide_dtype(steps.device) is torch.float32:
        return -torch.expm1(steps * math.log(max(beta, 1e-40)))
    return 1 - beta ** steps.double()


class AdamW(AdamWStep, torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), bit-identical, and with its state.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments, per step.
        eps: added to the root of the second moment.
        weight_decay: factor of ``lr``.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
