"""The tensors of optimizers by name: of a parameter, and of an optimizer as a whole."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from oneloop.basics.tensors import Optimizers, as_real, optimized, optimizers_of

OWN = "optimizer.."
"""beginning of the names of tensors of an optimizer that belong to no parameter"""


def optimizer_tensors(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return the tensors (not copies) of optimizers by ``optimizer.<parameter>.<key>``.

    Those that belong to no parameter have the names of :func:`own_name`.
    """
    tensors = {}
    for owner, one in optimizers_of(optimizer):
        leaves, _ = tree_flatten_with_path(own_state(one))
        for path, value in leaves:
            if is_plain_tensor(value):
                tensors[own_name(owner, path)] = value.detach()
    for name, parameter, _, one in optimized(model, optimizer):
        for key, value in sorted(one.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = as_real(value.detach())
    return tensors


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer that belongs to no parameter.

    It is the entries of its parameter groups, and what it adds to its ``state_dict()``.
    """
    own = dict(optimizer.state_dict())
    for name in ("state", "param_groups"):
        own.pop(name, None)
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    return {"groups": groups, "own": own}


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value in :func:`own_state` is a tensor that a checkpoint can store."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_complex()


def own_name(owner: str, path: Any) -> str:
    """Return the name of a tensor in the :func:`own_state` of an optimizer of this name."""
    return f"{OWN}{owner}{keystr(path)}"
