"""The model of a run before its first step, whose outputs a task may compare with those of now."""

from dataclasses import replace

from torch import nn

from oneloop.data.batch_layout import BatchLayout
from oneloop.job.model import build_model
from oneloop.launch.processes import Run
from oneloop.recipe.class_paths import CHOICES
from oneloop.tools.after_training.trained_model import Trained


def initial_model(of: Trained, run: Run) -> nn.Module:
    """Return the model of a run before its first step, prepared. Collective under FSDP2.

    Raises:
        ValueError: its initial weights are missing, or cannot be read.
    """
    machine = replace(of.recipe.machine, compile="none", recompute="none", offload=False)
    recipe = replace(of.recipe, machine=machine)
    if recipe.task.name in CHOICES["task"]:
        # The trained weights needed no others, but these may begin with those of a base model.
        vars(of.task)["pretrained"] = recipe.task.options.get("pretrained")
    try:
        built = build_model(
            recipe, of.task, BatchLayout(1, 1), sharded=run.sharded, device=run.device.type
        )
    except ValueError as error:
        raise ValueError(
            f"the model before the first step is needed, and it cannot be loaded: {error}; "
            "restore its weights"
        ) from error
    return run.prepare_frozen(built.model, names=recipe.machine.blocks)
