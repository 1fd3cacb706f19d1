"""Element-wise updates, which are bit-identical for every sharding of the parameters.

Fused CPU kernels compute the last elements of a tensor differently, and which elements these are
depends on the length of the shard. The functions here use torch's foreach operations, bit-identical
to torch's foreach optimizers (2.15). They also take ``found_inf``: if it is 1, they change nothing,
without a host sync.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.wide_sums import wide_dtype


def ignores_flag(groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether fused kernels ignore ``found_inf``: those of an Apple GPU (pytorch #186360).

    Args:
        groups: parameter groups of an optimizer.
    """
    return any(one.device.type == "mps" for group in groups for one in group["params"])


@torch.no_grad()
def adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
    found_inf: Tensor | None = None,
) -> None:
    """AdamW (Loshchilov & Hutter 2019), in place.

    Args:
        parameters: this rank's shards.
        gradients: of the same shapes.
        exp_avgs: first moments, of the same shapes.
        exp_avg_sqs: second moments, of the same shapes.
        steps: numbers of updates so far (0-dim, float32).
        group: the parameter group, with ``lr``, ``betas`` (decay rates of the moments, per step),
            ``eps`` (added to the root of the second moment) and ``weight_decay`` (factor of
            ``lr``).
        found_inf: 0-dim; if it is 1, nothing changes.
    """
    if not parameters:
        return

    # Count the step, unless it is bad, and update the moments.
    counted = torch.stack([*steps]) + (1 if found_inf is None else 1 - found_inf)
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    first = torch._foreach_lerp(exp_avgs, gradients, 1 - beta1)
    second = torch._foreach_mul(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)

    # Calculate the bias corrections of all parameters at once.
    counted_once = counted.clamp(min=1)  # no division by zero if the first step is bad
    size = (-lr / _correction(beta1, counted_once)).to(first[0].dtype)
    root = _correction(beta2, counted_once).sqrt().to(first[0].dtype)

    # Divide the first moments by the roots of the second ones.
    below = torch._foreach_sqrt(second)
    torch._foreach_div_(below, root.unbind())
    torch._foreach_add_(below, group["eps"])
    moved = torch._foreach_mul(first, size.unbind())
    torch._foreach_div_(moved, below)

    # Decay and move the parameters. Write the results, unless the step is bad.
    new = torch._foreach_mul(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_add_(new, moved)
    torch._foreach_copy_(steps, counted.unbind())
    for held, made in ((exp_avgs, first), (exp_avg_sqs, second), (parameters, new)):
        _put(held, made, found_inf)


def _correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta ** steps in float64, or rounded to float32 if the device has no float64."""
    if wide_dtype(steps.device) is torch.float32:
        return -torch.expm1(steps * math.log(max(beta, 1e-40)))
    return 1 - beta ** steps.double()


@torch.no_grad()
def sgd_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Any],
    group: Mapping[str, Any],
    found_inf: Tensor | None = None,
) -> None:
    """Stochastic gradient descent, in place.

    Args:
        parameters: this rank's shards.
        gradients: of the same shapes.
        buffers: momentum, of the same shapes; zero before the first step. Unused without momentum.
        group: the parameter group, with ``lr``, ``momentum`` (share of the previous update to
            keep), ``weight_decay`` (share of the parameters that is added to the gradients) and
            ``nesterov``.
        found_inf: 0-dim; if it is 1, nothing changes.
    """
    moved: list[Tensor] | tuple[Tensor, ...] = gradients
    momentum = group["momentum"]
    if group["weight_decay"]:
        moved = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
    if momentum:
        new = torch._foreach_mul(buffers, momentum)
        torch._foreach_add_(new, moved)
        moved = torch._foreach_add(moved, new, alpha=momentum) if group["nesterov"] else new
        _put(buffers, new, found_inf)
    _put(parameters, torch._foreach_add(parameters, moved, alpha=-group["lr"]), found_inf)


def _put(held: list[Tensor], made: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Copy the new tensors over the held ones, unless the step is bad."""
    if found_inf is None:
        torch._foreach_copy_(held, [*made])
        return
    bad = found_inf > 0
    for one, new in zip(held, made, strict=True):
        torch.where(bad, one, new, out=one)
