"""What a task, an optimizer and a schedule must look like.

:data:`MISFITS` checks an object before it is called, since a name can lead to any function of any
package. :data:`OPTIONS` names the packaged optimizers and schedules.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

EXPECTED = {
    "task": "a class with the members of oneloop.task_protocol.protocol.Task",
    "optimizer": "a torch.optim.Optimizer, or a function (params, *, lr, …) that returns one",
    "schedule": "a function (step, total) -> factor, a class of torch.optim.lr_scheduler, or a "
    "function (optimizer, …) that returns one",
}
# options of the packaged optimizers and schedules, known without importing them
OPTIONS = {
    "optimizer": {
        "adamw": ("betas", "eps"),
        "sgd": ("momentum", "nesterov"),
        "muon": ("momentum", "nesterov", "iterations", "precision", "betas", "eps", "adamw_for"),
        "adafactor": ("eps", "d", "beta2_decay"),
    },
    "schedule": {
        "constant": (),
        "linear": (),
        "cosine": (),
        "wsd": ("decay",),
        "plateau": ("factor", "patience"),
    },
}

_MEMBERS = ("model", "train_set", "eval_sets", "collate", "weight", "loss")  # of a task


def _unlike_task(chosen: Any) -> str:
    if not isinstance(chosen, type):
        return f"is a {type(chosen).__name__}, not a class"
    lacks = [member for member in _MEMBERS if not callable(getattr(chosen, member, None))]
    # later checks name fewer missing members
    return f"is a class that lacks {', '.join(lacks)}" if len(lacks) > 3 else ""


def _unlike_optimizer(chosen: Any) -> str:
    if isinstance(chosen, type):
        if is_subclass(chosen, "torch.optim.optimizer.Optimizer"):
            return ""
        return "is a class, but not a torch.optim.Optimizer"
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, neither a class nor a function"
    if {"params", "lr"} <= takes.keys():
        return ""
    return f"is a function of ({', '.join(takes)}), and not of (params, *, lr, …)"


def _unlike_schedule(chosen: Any) -> str:
    if isinstance(chosen, type):
        if is_subclass(chosen, "torch.optim.lr_scheduler.ReduceLROnPlateau"):
            return "needs results of evaluations; use schedule.name plateau"
        if is_subclass(chosen, "torch.optim.lr_scheduler.LRScheduler"):
            return ""
        return "is a class, but not a torch.optim.lr_scheduler.LRScheduler"
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, neither a class nor a function"
    if "optimizer" in takes:
        return ""
    positional = [one for one in takes.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    if sum(one.default is one.empty for one in positional) == 2:
        return ""
    return f"is a function of ({', '.join(takes)}), and not of two arguments"


def is_subclass(kind: type, parent: str) -> bool:
    """Return whether a class has a parent of this name; this package does not import torch."""
    return any(f"{one.__module__}.{one.__name__}" == parent for one in kind.__mro__)


def _parameters(chosen: Any) -> Mapping[str, inspect.Parameter] | None:
    return inspect.signature(chosen).parameters if inspect.isfunction(chosen) else None


MISFITS: dict[str, Callable[[Any], str]] = {
    "task": _unlike_task,
    "optimizer": _unlike_optimizer,
    "schedule": _unlike_schedule,
}
"""functions that return why an object cannot be the task, …; empty if it can"""
