"""Optimizers by name or class path.

Weight decay is for matrices only, unless settings name other parameters.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.optim.adamw import AdamW
from oneloop.optim.muon import Muon, hidden_matrices
from oneloop.optim.parameter_groups import LR_FACTOR, Groups, Settings, parameter_groups
from oneloop.optim.sgd import SGD


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
        make: a function of this file, or an optimizer class.
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
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"it returned a {type(optimizer).__name__}, not a torch.optim.Optimizer; a run has one "
            "optimizer, which may train several networks (docs/how-to/gans.md)"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"it returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")

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


def _is_fused(params: Groups) -> bool:
    devices = _get_fused_kernels_supported_devices()
    parameters = [parameter for group in params for parameter in group["params"]]
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


def adamw(
    params: Groups, *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused.

    Args:
        params: parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments, per step.
        eps: added to the root of the second moment.
    """
    kind = AdamW if _is_fused(params) else torch.optim.AdamW
    return kind(params, lr=lr, betas=betas, eps=eps)


def sgd(params: Groups, *, lr: float, momentum: float = 0.9, nesterov: bool = False) -> Optimizer:
    """Stochastic gradient descent, fused.

    Args:
        params: parameter groups.
        lr: learning rate.
        momentum: share of the previous update to keep.
        nesterov: use Nesterov momentum (requires momentum).
    """
    kind = SGD if _is_fused(params) else torch.optim.SGD
    return kind(params, lr=lr, momentum=momentum, nesterov=nesterov)


def muon(
    params: Groups,
    *,
    model: nn.Module,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    precision: Literal["exact", "bf16"] = "exact",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    adamw_for: tuple[str, ...] = ("lm_head", "head", "classifier", "score", "fc"),
) -> Optimizer:
    """Muon (Jordan 2024) for hidden matrices, AdamW for the rest.

    Both have one learning rate (Liu et al. 2025).

    Args:
        params: parameter groups.
        model: as prepared, to find embeddings, output heads and the ranks that share the work.
        lr: learning rate.
        momentum: momentum of Muon.
        nesterov: use Nesterov momentum in Muon.
        precision: exact iterates in float32 or better; bf16 is faster on GPUs, but then another
            parallel layout differs by about 5e-3 after 20 steps.
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        adamw_for: names of modules whose matrices also get AdamW (a component of the dotted name).
    """
    # Divide each group into matrices for Muon, and the rest for AdamW.
    matrices = hidden_matrices(model, adamw_for)
    groups: Groups = []
    for group in params:
        for chosen in (True, False):
            if members := [p for p in group["params"] if (p in matrices) is chosen]:
                groups.append({**group, "params": members, "muon": chosen})
    replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
    return Muon(
        groups,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        betas=betas,
        eps=eps,
        replicas=replicas,
    )


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
