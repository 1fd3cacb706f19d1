"""Optimizers by name or class path.

Weight decay is for matrices only, unless settings name other parameters.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.optim.adamw import AdamW
from oneloop.optim.muon import Muon
from oneloop.optim.parameter_groups import LR_FACTOR, Settings, parameter_groups
from oneloop.optim.sgd import SGD

# the short names of optimizer.name
adamw = AdamW
sgd = SGD
muon = Muon


def build(
    make: Callable[..., Optimizer],
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    elementwise: bool = False,
) -> Optimizer:
    """Build an optimizer over the parameters of ``model``, which is already sharded.

    Args:
        make: an optimizer class, or a function that returns an optimizer.
        model: holds the parameters.
        lr: learning rate.
        weight_decay: weight decay of matrices.
        options: keyword arguments of ``make``.
        settings: ``lr_factor`` and ``weight_decay`` of single parameters, by their bare names.
        elementwise: whether updates must be bit-identical for every sharding.

    Raises:
        ValueError: ``make`` does not support ``weight_decay`` or ``elementwise``, or returned no
            optimizer.
        BadInput: the optimizer keeps two sets of weights.
    """
    # An optimizer class may lack weight decay.
    arguments = inspect.signature(make).parameters
    wanted = weight_decay
    for own in (settings or {}).values():
        wanted = wanted or own.get("weight_decay") or 0
    if wanted and isinstance(make, type) and "weight_decay" not in arguments:
        raise ValueError(
            f"optimizer.weight_decay {wanted}: {make.__name__} has no weight decay; set it to 0"
        )

    # Build it over groups of parameters.
    named = [(bare_name(name), parameter) for name, parameter in model.named_parameters()]
    groups = parameter_groups(named, weight_decay, settings=settings)
    if "model" in arguments:
        optimizer = make(groups, lr=lr, model=model, **(options or {}))
    else:
        optimizer = make(groups, lr=lr, **(options or {}))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"it returned a {type(optimizer).__name__}, not a torch.optim.Optimizer; a run has one "
            "optimizer, which may train several networks (docs/how-to/gans.md)"
        )

    # An evaluation would change the weights of schedule-free optimizers.
    if hasattr(optimizer, "eval") and hasattr(optimizer, "train"):
        raise BadInput(
            f"{type(optimizer).__name__} keeps two sets of weights, and eval() with train() "
            "changes them by 3e-8, so an evaluation would change the run; use it in a loop of your "
            "own, with RunState (docs/how-to/your-loop.md)"
        )

    # Only optimizers that know the flag can leave out fused kernels.
    if elementwise:
        if not hasattr(optimizer, "elementwise"):
            raise ValueError(
                f"batch.grain: the update of {type(optimizer).__name__} depends on the sharding"
            )
        optimizer.elementwise = True

    # Remember each group's factor of the learning rate: the user's class may set rates per group.
    # As a default, checkpoints do not store it as an option.
    optimizer.defaults.setdefault(LR_FACTOR, 1.0)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            raise ValueError(
                "it keeps lr as a tensor in its parameter groups, and the loop sets a number"
            )
        own_factor = float(group["lr"]) / lr if lr else 1.0
        group[LR_FACTOR] = group.get(LR_FACTOR, 1.0) * own_factor
    return optimizer


def set_lr(optimizer: Optimizer, lr: float, momentum: float | None = None) -> float:
    """Set the learning rate of every parameter group, and its momentum; return ``lr``.

    Args:
        optimizer: its next step uses them.
        lr: multiplied by the group's factor.
        momentum: also the first of Adam's betas (as torch's OneCycleLR); None: unchanged.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_FACTOR, 1.0)
        if momentum is not None and "momentum" in group:
            group["momentum"] = momentum
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
    return lr
