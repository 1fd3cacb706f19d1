"""The model of a run: build it from the seed, load initial weights, and adapt it to the machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from oneloop.basics.base_models import BaseModel
from oneloop.basics.seeds import key, seed_others
from oneloop.basics.system.memory import anonymous_memory
from oneloop.basics.tensors import dense, one_element
from oneloop.basics.wide_sums import wide_dtype
from oneloop.checkpoint.state_dict import unsavable
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.apple_gpu import reject_model
from oneloop.machine.blocks import blocks, class_names, has_batch_statistics
from oneloop.machine.compile import CUDA_GRAPHS, compile_
from oneloop.machine.frozen_dtype import count, hold_frozen
from oneloop.machine.load_in_turn import in_turn, local_processes
from oneloop.machine.recompute import parsed, recompute
from oneloop.machine.torch_settings import channels_last, reject_not_deterministic
from oneloop.optim.parameter_groups import LR_FACTOR, chosen, freeze, layer_decay
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.protocol import Task
from oneloop.task_protocol.protocol_checks import named, theirs

_NOTABLE = 1e9  # bytes of host memory for which a note is worthwhile


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
    return {"float32": torch.float32, "float64": torch.float64}[recipe.machine.dtype]


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
    if recipe.machine.dtype == "float64" and wide_dtype(torch.device(device)) is not torch.float64:
        raise ValueError(
            f"machine.dtype float64 requires a device with float64, and {device} has none; set "
            "machine.device cpu, or remove machine.dtype"
        )

    # Let the task build it.
    notes: list[str] = []
    if on_meta:
        model = _on_meta(recipe, task)
    else:
        model, notes = _make_model(recipe, task, sharded=sharded)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{named(task, 'model')} returned a {type(model).__name__}; a torch.nn.Module is needed"
        )
    _reject_unfit(model, task, sharded=sharded)
    if device == "mps":
        reject_model(recipe, model)

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
    settings, setting_notes = _parameters(model, recipe, modules, origin, sharded=sharded)
    names = class_names(modules)
    notes += setting_notes + _adapt_to_machine(model, recipe, names, sharded=sharded, device=device)

    # Reject what would not be exact.
    _reject_inexact(recipe, model, layout)
    _reject_graphs(recipe, layout, sharded=sharded)
    if device == "cuda" and layout.grain:
        reject_not_deterministic(model, "batch.grain")
    elif device == "cuda" and recipe.machine.deterministic:
        reject_not_deterministic(model, "machine.deterministic true")
    return BuiltModel(model, names, notes, structure, settings, sum(map(count, model.parameters())))


def _on_meta(recipe: Recipe, task: Task) -> Any:
    try:
        with torch.device("meta"):
            return task.model()
    except Exception:  # it reads values; an error of the task is raised again
        return _make_model(recipe, task, sharded=False)[0]


def _make_model(recipe: Recipe, task: Task, *, sharded: bool) -> tuple[Any, list[str]]:
    """Return the task's model, with the random numbers of the seed, and lines for the log."""

    def make() -> Any:
        number = key(recipe.seed)
        torch.manual_seed(number)
        seed_others(number)
        return theirs(task, "model", task.model)

    processes = local_processes()
    before = anonymous_memory()
    model = in_turn(make) if recipe.machine.in_turn else make()
    size = anonymous_memory() - before
    if recipe.machine.in_turn or not sharded or size * processes < _NOTABLE:
        return model, []
    note = (
        f"{processes} processes of this host each allocated {size / 1e9:.1f} GB of weights before "
        "sharding; --machine.in_turn true has one copy at a time in memory"
    )
    return model, [note]


def _parameters(
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
    in_eval = freeze(model, names, keep_modes=optimizer.frozen_modules == "keep")
    sizes = {name: count(parameter) for name, parameter in model.named_parameters()}
    notes = []
    if in_eval:
        more = f" and {len(in_eval) - 3:,} more" if len(in_eval) > 3 else ""
        notes.append(
            f"in eval mode, because they or their modules are frozen: {', '.join(in_eval[:3])}"
            f"{more}; --optimizer.frozen_modules keep keeps the mode that model() returns"
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
    notes += hold_frozen(model, machine.base_dtype, sharded=sharded, stored=machine.quant_storage)
    if frozen:
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen) / 1e6
        location = "saved once, in base/"
        if origin is not None:
            location = f"not saved, but read from {origin.place}"
        notes.append(
            f"frozen: {sum(map(count, frozen)):,} of {sum(sizes.values()):,} parameters "
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


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert float32 parameters and buffers to ``dtype``, in place.

    Other dtypes stay as they are.
    """
    if dtype is not torch.float32:
        model._apply(lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor)


def _reject_unfit(model: nn.Module, task: Task, *, sharded: bool) -> None:
    """Raise ValueError if the model cannot be trained, sharded or saved."""

    def source() -> str:
        """Return where the model is from. Only for an error: it reads the user's file."""
        return named(task, "model")

    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}

    # Can it be trained?
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{source()} returned a lazy module: {lazy[0]} has no shape yet; put a batch through "
            "it in model() first, or state the shape"
        )
    if not trained:
        raise ValueError(
            f"{source()} returned a model with {len(parameters)} parameters of which none is "
            "trained (requires_grad is False in all of them); keep some of them trainable"
        )
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse:
            raise ValueError(
                f"the gradient of {name}.weight is sparse, which is not supported; set sparse=False"
            )

    # Can it be sharded?
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()})
    if sharded and (len(kinds) > 1 or kinds[0].startswith("complex")):
        raise ValueError(
            f"{source()} trains {' and '.join(kinds)} parameters; FSDP2 needs one real dtype: use "
            "ddp.yaml"
        )
    for name, parameter in parameters.items():
        if parameter.requires_grad and not dense(parameter):
            raise ValueError(
                f"{source()}: the parameter {name} has gaps between its elements (strides "
                f"{parameter.stride()}); call .contiguous() on it"
            )
        fault = _unshardable(parameter) if sharded else ""
        if fault:
            raise ValueError(f"{source()}: the parameter {name} {fault}, or run it with ddp.yaml")

    # Can it be saved?
    wrong = unsavable(model)
    if wrong:
        raise ValueError(f"{source()} cannot be saved: {wrong}")


def _unshardable(parameter: nn.Parameter) -> str:
    """Return why FSDP2 cannot shard a parameter, or would train it differently; empty if it can."""
    if not parameter.numel():
        return "has no elements, which FSDP2 cannot reduce; leave it out"
    if not parameter.is_contiguous():
        return (
            f"is not contiguous (strides {parameter.stride()}), which FSDP2 cannot shard; call "
            ".contiguous() on it"
        )
    if parameter.requires_grad and (
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ):
        return "has a gradient hook, which FSDP2 would drop; put the hook on an activation"
    return ""


def _adapt_to_machine(
    model: nn.Module, recipe: Recipe, names: list[str], *, sharded: bool, device: str
) -> list[str]:
    """Apply the settings of ``machine`` to the model, in place; return lines for the log."""
    machine = recipe.machine
    notes = []
    kind, share = parsed(machine.recompute)
    if machine.offload and device in ("cpu", "mps"):
        where = "a CPU" if device == "cpu" else "an Apple GPU"
        raise ValueError(
            f"machine.offload requires a GPU with its own memory; on {where}, activations are in "
            "host memory already"
        )

    # Memory format. With batch.grain, auto would differ under FSDP2.
    layout_setting = False if recipe.batch.grain else machine.channels_last
    if channels_last(model, layout_setting, device=device, sharded=sharded):
        notes.append("convolutions run channels last")

    # Activation checkpointing.
    number = recompute(model, machine.recompute, names=machine.blocks, offload=machine.offload)
    if number:
        notes.append(f"recompute {machine.recompute}: {number} blocks of {', '.join(names)}")
    budget = None
    if kind == "budget":
        budget = share
        notes.append(
            f"recompute {machine.recompute} sets torch's activation_memory_budget; a smaller share "
            "may have a higher peak (pytorch #197838), so measure several"
        )

    # Compilation.
    number = compile_(
        model,
        machine.compile,
        mode=machine.compile_mode,
        names=machine.blocks,
        sharded=sharded,
        budget=budget,
    )
    if number:
        unit = "blocks" if machine.compile == "regional" else "model"
        notes.append(f"compile {machine.compile}: {number} {unit}; the first step waits for it")
    return notes


def _reject_inexact(recipe: Recipe, model: nn.Module, layout: BatchLayout) -> None:
    """Raise ValueError if training would depend on the parallel layout, or on bad batches."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    batch_statistics = has_batch_statistics(model)

    # On the parallel layout?
    if layout.grain and any(parameter.is_complex() for _, parameter in trained):
        raise ValueError(
            f"batch.grain {layout.grain} requires real parameters: sums of complex gradients are "
            "not known to be exact; or remove batch.grain"
        )
    hooked = [name for name, parameter in trained if parameter._post_accumulate_grad_hooks]
    if hooked and not layout.grain:
        raise ValueError(
            f"the parameter {hooked[0]} has a post-accumulate gradient hook, so the weights would "
            "depend on batch.micro; use register_hook, or set batch.grain"
        )
    if layout.grain and batch_statistics:
        raise ValueError(
            f"batch.grain {layout.grain} does not work with BatchNorm: the running statistics of "
            "BatchNorm would depend on the micro-batches of each process; use GroupNorm or "
            "LayerNorm, or freeze it in eval mode"
        )

    # On a bad batch, whose step is skipped?
    guard = recipe.guard
    skips = guard.nonfinite == "skip" or (guard.sigma and guard.spike == "skip")
    if skips and batch_statistics:
        raise ValueError(
            "guard skip does not work with BatchNorm: its running statistics are updated by a bad "
            "batch before it is detected; set rewind or stop"
        )


def _reject_graphs(recipe: Recipe, layout: BatchLayout, *, sharded: bool) -> None:
    """Raise ValueError if CUDA graphs would overwrite gradients, or be recorded in every step."""
    mode = recipe.machine.compile_mode
    if recipe.machine.compile == "none" or mode not in CUDA_GRAPHS:
        return
    if sharded:
        raise ValueError(
            f"machine.compile_mode {mode} does not work with FSDP2: it gathers weights into new "
            "memory in every step, so CUDA graphs would be recorded again each time; set "
            "max-autotune-no-cudagraphs or default, or use ddp.yaml"
        )
    if layout.accumulate > 1:
        raise ValueError(
            f"machine.compile_mode {mode} does not work with {layout.accumulate} micro-batches a "
            "step, because CUDA graphs reuse the memory of gradients; set "
            "max-autotune-no-cudagraphs or default, or batch.micro to the whole share of a process"
        )
