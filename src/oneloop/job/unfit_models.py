"""Reject models that cannot be trained exactly, sharded or saved, before anything is written."""

from torch import nn

from oneloop.basics.tensors import dense
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.data.batch_layout import BatchLayout
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.compile import CUDA_GRAPHS
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.protocol import Task
from oneloop.task_protocol.user_code import named


def reject_unfit(model: nn.Module, task: Task, *, sharded: bool) -> None:
    """Raise ValueError if the model cannot be trained, sharded or saved."""
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained:
        raise ValueError(
            f"{named(task, 'model')} returned a model with {len(parameters)} parameters of which "
            "none is trained (requires_grad is False in all of them); keep some of them trainable"
        )

    # Can it be sharded?
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()})
    if sharded and (len(kinds) > 1 or kinds[0].startswith("complex")):
        raise ValueError(
            f"{named(task, 'model')} trains {' and '.join(kinds)} parameters; FSDP2 needs one real "
            "dtype: use ddp.yaml"
        )
    for name, parameter in parameters.items():
        fault = ""
        if name in trained and not dense(parameter):
            fault = (
                f"has gaps between its elements (strides {parameter.stride()}); call .contiguous() "
                "on it"
            )
        elif sharded and not (parameter.numel() and parameter.is_contiguous()):
            fault = (
                f"has the shape {tuple(parameter.shape)} and strides {parameter.stride()}; FSDP2 "
                "cannot shard a parameter that is empty or not contiguous: leave it out or call "
                ".contiguous() on it, or use ddp.yaml"
            )
        elif sharded and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            fault = (
                "has a gradient hook, which FSDP2 would drop; put the hook on an activation, or "
                "use ddp.yaml"
            )
        if fault:
            raise ValueError(
                f"{named(task, 'model')}: the parameter {name} cannot be trained as it is: it "
                f"{fault}"
            )

    # Can it be saved?
    try:
        model_tensors(model)
    except ValueError as error:
        raise ValueError(f"{named(task, 'model')} cannot be saved: {error}") from error


def reject_inexact(recipe: Recipe, model: nn.Module, layout: BatchLayout, *, sharded: bool) -> None:
    """Raise ValueError if the model, as it will run, would not be trained exactly.

    Args:
        recipe: its groups batch, machine and guard apply.
        model: after the settings of ``machine`` are applied.
        layout: of the batch.
        sharded: whether FSDP2 will shard it.
    """
    # CUDA graphs would be recorded in every step, or overwrite gradients.
    mode = recipe.machine.compile_mode
    graphs = recipe.machine.compile != "none" and mode in CUDA_GRAPHS
    if graphs and sharded:
        raise ValueError(
            f"machine.compile_mode {mode} does not work with FSDP2: it gathers weights into new "
            "memory in every step, so CUDA graphs would be recorded again each time; set "
            "max-autotune-no-cudagraphs or default, or use ddp.yaml"
        )
    if graphs and layout.accumulate > 1:
        raise ValueError(
            f"machine.compile_mode {mode} does not work with {layout.accumulate} micro-batches a "
            "step, because CUDA graphs reuse the memory of gradients; set "
            "max-autotune-no-cudagraphs or default, or batch.micro to the whole share of a process"
        )

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
    skips = guard.nonfinite == "skip" or guard.sigma
    if skips and batch_statistics:
        raise ValueError(
            "guard skip does not work with BatchNorm: its running statistics are updated by a bad "
            "batch before it is detected; set rewind or stop"
        )
