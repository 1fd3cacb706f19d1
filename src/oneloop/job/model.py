"""The model of a run: build it from the seed, load initial weights, and adapt it to the machine."""

import re
from collections.abc import Mapping, Sequence
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
from oneloop.job.unfit_models import reject_inexact, reject_unfit
from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.compile import compile_
from oneloop.machine.torch_settings import channels_last
from oneloop.optim.parameter_groups import LR_FACTOR, chosen, freeze, layer_decay
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
    settings, setting_notes = _set_up_parameters(model, recipe, modules, origin, sharded=sharded)
    names = class_names(modules)
    notes += setting_notes + _adapt_to_machine(model, recipe, names, sharded=sharded, device=device)

    reject_inexact(recipe, model, layout, sharded=sharded)
    number = sum(map(_count, model.parameters()))
    return BuiltModel(model, names, notes, structure, settings, number)


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


def _count(parameter: Any) -> int:
    """Return the number of elements of a parameter.

    Of a 4-bit parameter, return that of the tensor that it encodes.
    """
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())


def _set_up_parameters(
    model: nn.Module,
    recipe: Recipe,
    modules: Sequence[nn.Module],
    origin: BaseModel | None,
    *,
    sharded: bool,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Freeze parameters in place; return the settings of single parameters, and lines for the log.

    Raise ValueError if a pattern matches no parameter, two patterns conflict, or no parameter is
    trainable."""
    # Freeze what optimizer.groups says.
    optimizer = recipe.optimizer
    patterns = {pattern: rule.settings for pattern, rule in optimizer.groups.items()}
    settings, matched = chosen(model, patterns)
    names = [name for name, setting in settings.items() if setting.get("freeze")]
    in_eval = freeze(model, names)
    sizes = {name: _count(parameter) for name, parameter in model.named_parameters()}
    notes = []
    if in_eval:
        notes.append(
            f"{len(in_eval):,} modules are in eval mode, because they or their modules are frozen: "
            f"{', '.join(in_eval[:3])}"
        )
    for pattern, chosen_names in matched.items():
        pairs = ", ".join(f"{key} {value}" for key, value in patterns[pattern].items())
        number = sum(sizes[name] for name in chosen_names)
        notes.append(f"{pattern}: {number:,} parameters in {len(chosen_names)} tensors: {pairs}")
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if len(frozen) == len(sizes):
        raise ValueError(
            "optimizer.groups freezes all parameters of the model; keep some of them trainable"
        )

    # Store frozen parameters in fewer bytes.
    machine = recipe.machine
    if frozen or machine.base_dtype:
        from oneloop.machine.frozen_dtype import hold_frozen

        hold_frozen(model, machine.base_dtype, sharded=sharded)
    if frozen:
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen) / 1e6
        location = "saved once, in base/"
        if origin is not None:
            location = f"not saved, but read from {origin.place}"
        notes.append(
            f"frozen: {sum(map(_count, frozen)):,} of {sum(sizes.values()):,} parameters "
            f"({size:,.1f} MB), {location}; without optimizer state and EMA weights"
        )

    # Lower the learning rates of early layers.
    if optimizer.layer_decay != 1:
        factors = layer_decay(model, modules, optimizer.layer_decay)
        for name, factor in factors.items():
            setting = settings.setdefault(name, {})
            setting[LR_FACTOR] = setting.get(LR_FACTOR, 1.0) * factor
        notes.append(
            f"layer-wise decay over {len(modules)} blocks: learning-rate factors from "
            f"{min(factors.values()):.3g} to 1"
        )
    return settings, notes


def _adapt_to_machine(
    model: nn.Module, recipe: Recipe, names: list[str], *, sharded: bool, device: str
) -> list[str]:
    """Apply the settings of ``machine`` to the model, in place; return lines for the log."""
    machine = recipe.machine
    notes = []
    if machine.offload and device in ("cpu", "mps"):
        raise ValueError(
            f"machine.offload requires a GPU with its own memory; on {device}, activations are in "
            "host memory already"
        )

    # Memory format. With batch.grain, auto would differ under FSDP2.
    layout_setting = False if recipe.batch.grain else machine.channels_last
    if channels_last(model, layout_setting, device=device, sharded=sharded):
        notes.append("convolutions run channels last")

    # Activation checkpointing.
    if machine.recompute != "none" or machine.offload:
        from oneloop.machine.recompute import recompute

        number = recompute(model, machine.recompute, names=machine.blocks, offload=machine.offload)
        if machine.recompute.startswith("budget"):
            if machine.compile == "none":
                raise ValueError(
                    "recompute budget requires machine.compile regional or whole; or set recompute "
                    "selective"
                )
            notes.append(
                f"recompute {machine.recompute} sets torch's activation_memory_budget; a smaller "
                "share may have a higher peak (pytorch #197838), so measure several"
            )
        else:
            notes.append(f"recompute {machine.recompute}: {number} blocks of {', '.join(names)}")

    # Compilation.
    number = compile_(
        model,
        machine.compile,
        mode=machine.compile_mode,
        names=machine.blocks,
        sharded=sharded,
    )
    if number:
        unit = "blocks" if machine.compile == "regional" else "model"
        notes.append(f"compile {machine.compile}: {number} {unit}; the first step waits for it")
    return notes


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert float32 parameters and buffers to ``dtype``, in place.

    Other dtypes stay as they are.
    """
    if dtype is not torch.float32:
        model._apply(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)
