"""Adapt a model to the recipe: frozen parameters, settings, memory format, recompute, compile."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from oneloop.basics.base_models import BaseModel
from oneloop.machine.compile import compile_
from oneloop.machine.torch_settings import channels_last
from oneloop.optim.parameter_groups import LR_FACTOR, chosen, freeze, layer_decay
from oneloop.recipe.schema import Recipe


def count(parameter: Any) -> int:
    """Return the number of elements of a parameter.

    Of a 4-bit parameter, return that of the tensor that it encodes.
    """
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())


def set_up_parameters(
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
    sizes = {name: count(parameter) for name, parameter in model.named_parameters()}
    notes = []
    if in_eval:
        more = f" and {len(in_eval) - 3:,} more" if len(in_eval) > 3 else ""
        notes.append(
            f"in eval mode, because they or their modules are frozen: {', '.join(in_eval[:3])}"
            f"{more}"
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

        notes += hold_frozen(model, machine.base_dtype, sharded=sharded)
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


def adapt_to_machine(
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
    budget = None
    if machine.recompute != "none" or machine.offload:
        from oneloop.machine.recompute import parsed, recompute

        kind, share = parsed(machine.recompute)
        number = recompute(model, machine.recompute, names=machine.blocks, offload=machine.offload)
        if kind == "budget":
            budget = share
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
        budget=budget,
    )
    if number:
        unit = "blocks" if machine.compile == "regional" else "model"
        notes.append(f"compile {machine.compile}: {number} {unit}; the first step waits for it")
    return notes
