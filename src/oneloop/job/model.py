"""The model of a run: build it from the seed, load initial weights, and adapt it to the machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import BaseModel
from oneloop.basics.seeds import key, seed_others
from oneloop.basics.tensors import one_element
from oneloop.basics.wide_sums import wide_dtype
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.adapt_model import adapt_to_machine, count, set_up_parameters
from oneloop.job.unfit_models import reject_inexact, reject_unfit
from oneloop.machine.blocks import blocks, class_names
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.protocol import Task
from oneloop.task_protocol.user_code import named, theirs


@dataclass(frozen=True)
class BuiltModel:
    """A model before DDP or FSDP2 wraps it, with notes for the log and optimizer settings."""

    model: nn.Module
    blocks: list[str]  # class names of its blocks
    notes: list[str]  # lines for the start-up log
    structure: str  # its repr() as the task returned it
    settings: Mapping[str, Mapping[str, Any]]  # optimizer settings of single parameters
    number: int  # of parameters


def torch_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the weights."""
    dtype: torch.dtype = getattr(torch, recipe.machine.dtype)
    return dtype


def build_model(
    recipe: Recipe,
    task: Task,
    layout: BatchLayout,
    *,
    sharded: bool,
    device: str,
    on_meta: bool = False,
) -> BuiltModel:
    """Build the task's model as the recipe says.

    Args:
        recipe: its groups init, optimizer and machine apply.
        task: builds the model.
        layout: of the batch.
        sharded: whether FSDP2 will shard it.
        device: type of the device.
        on_meta: build it without memory for the weights, if the task can.

    Raises:
        ValueError: weights, layout or batch.grain do not fit the model.
    """
    wide = wide_dtype(torch.device(device))
    if recipe.machine.dtype == "float64" and wide is not torch.float64:
        raise ValueError(
            f"machine.dtype float64 requires a device with float64, and {device} has none; set "
            "machine.device cpu, or remove machine.dtype"
        )

    # Let the task build it.
    notes: list[str] = []
    model = _make_model(recipe, task, on_meta=on_meta)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{named(task, 'model')} returned a {type(model).__name__}; a torch.nn.Module is needed"
        )
    reject_unfit(model, task, sharded=sharded)

    # Load initial weights, in the dtype of the run.
    origin: BaseModel | None = getattr(task, "origin", None)
    structure = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # addresses of functions
    in_dtype(model, torch_dtype(recipe))
    if recipe.init.source:
        init = recipe.init
        left_out = load_weights(
            model, recipe.init.source, init.weights, leave_out=init.leave_out, origin=origin
        )
        if left_out:
            notes.append(f"init.leave_out: {len(left_out)} tensors keep the task's initial values")

    # Set up parameters, recomputation and compilation. FSDP2 shards no 0-dim tensors.
    if sharded:
        one_element(model)
    modules = blocks(model, recipe.machine.blocks)
    settings, setting_notes = set_up_parameters(model, recipe, modules, origin, sharded=sharded)
    names = class_names(modules)
    notes += setting_notes + adapt_to_machine(model, recipe, names, sharded=sharded, device=device)

    reject_inexact(recipe, model, layout, sharded=sharded)
    return BuiltModel(model, names, notes, structure, settings, sum(map(count, model.parameters())))


def _make_model(recipe: Recipe, task: Task, *, on_meta: bool) -> Any:
    """Return the task's model, with the random numbers of the seed."""
    if on_meta:
        try:
            with torch.device("meta"):
                return task.model()
        except Exception:  # it reads values; an error of the task is raised again
            pass
    number = key(recipe.seed)
    torch.manual_seed(number)
    seed_others(number)
    return theirs(task, "model", task.model)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert float32 parameters and buffers to ``dtype``, in place.

    Other dtypes stay as they are.
    """
    if dtype is not torch.float32:
        model._apply(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)
