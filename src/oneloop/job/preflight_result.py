"""What the preflight check finds out about a task and its model, for the run."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.measure.meter import OWN_METRICS
from oneloop.task_protocol.user_code import named


@dataclass
class Preflight:
    """Result of the preflight check, whose questions fill it in one after another."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether the loss of a batch is the sum of its samples' losses
    draws: bool = False  # whether collate, model or loss draw random numbers in training
    collate_draws: bool = False
    draws_others: bool = False  # whether training draws from Python's or numpy's generator
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    # parameters, then buffers, that a forward in training changes: "buffer norm.running_mean"
    moved: list[str] = field(default_factory=list)
    stateful: str = ""  # why the same samples and seeds do not give the same loss each time
    not_summed: str = ""
    """a parameter whose gradient of a batch is not the sum of those of its samples"""
    graph: Any = None  # the model graph for TensorBoard, on rank 0
    notes: list[str] = field(default_factory=list)  # remarks for the start-up log


def metric_names(outputs: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the real 0-dim outputs, which are logged as metrics, without ``loss``."""
    names = []
    for name, value in outputs.items():
        if torch.is_tensor(value) and not value.ndim and not value.is_complex() and name != "loss":
            names.append(name)
    return tuple(names)


def logged_names(task: Any, outputs: dict[str, Any]) -> tuple[str, ...]:
    """Return :func:`metric_names`. Raise BadInput if one is the name of another metric.

    Args:
        task: for the message.
        outputs: of its loss.
    """
    names = metric_names(outputs)
    for name in names:
        if f"train/{name}" in OWN_METRICS:
            raise BadInput(
                f"{named(task, 'loss')} returned the output {name!r}; oneloop also logs "
                f"train/{name}: rename it"
            )
    return names


def unused_parameters(job: Job, run: Run, model: nn.Module, used: Collection[str]) -> list[str]:
    """Return the trained parameters that get no gradient. Raise BadInput if DDP would wait.

    Args:
        job: what the recipe describes.
        run: this process.
        model: bare, or sharded by FSDP2.
        used: names of the parameters that get one.
    """
    unused = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and bare_name(name) not in used:
            unused.append(bare_name(name))

    # FSDP2 needs no gradient of each parameter, and machine.find_unused_parameters has DDP search.
    search = job.recipe.machine.find_unused_parameters
    if unused and run.ranks > 1 and not run.sharded and not search:
        raise BadInput(
            f"the loss does not use {len(unused)} parameters ({', '.join(unused[:3])}), so DDP "
            "would wait for their gradients; freeze them (requires_grad_(False) in model()), or, "
            "if other steps, samples or random numbers use them, set "
            "--machine.find_unused_parameters true"
        )
    return unused
