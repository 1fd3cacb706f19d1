"""Load the model of a run, with its weights, for another command."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oneloop.basics.base_models import BaseModel
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.named_checkpoint import FINAL, base_model_of, chosen_of
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.model import BuiltModel, build_model, torch_dtype
from oneloop.job.task import make_task
from oneloop.recipe.class_paths import CHOICES
from oneloop.recipe.schema import InitConfig, Recipe
from oneloop.run.final_weights import load_task_state
from oneloop.task_protocol.protocol import RECORDED, Progress, Task
from oneloop.tools.after_training.recorded_task import recorded_by, reject_changed_data
from oneloop.tools.after_training.rounded_matrices import round_frozen


@dataclass(frozen=True)
class Trained:
    """The task and the model of a run."""

    recipe: Recipe
    task: Task
    built: BuiltModel
    about: str  # describes the weights in messages
    eval_micro: int | None = None
    """micro-batch size of the run's evaluations: another size pads texts differently, which changes
    rounding"""

    @property
    def model(self) -> nn.Module:
        """The model with the weights of the run."""
        return self.built.model

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for evaluation: micro-batch size, dtype, seed and pinned memory."""
        recipe = self.recipe
        own = recipe.batch.micro
        if not isinstance(own, int):
            own = min(recipe.batch.size, 64)
        return {
            "micro": recipe.eval.micro or self.eval_micro or own,
            "dtype": torch_dtype(recipe),
            "seed": recipe.seed,
            "pinned": recipe.machine.pinned,
        }


def trained(
    run: Path,
    recipe: Recipe,
    *,
    checkpoint: str | None,
    weights: str,
    sharded: bool,
    device: str,
    accept_changes: bool = False,
    own_data: bool = True,
) -> Trained:
    """Return task and model of a run, before the model is wrapped for distributed execution.

    Args:
        run: The run folder.
        recipe: Its recipe, from :func:`oneloop.tools.after_training.recorded_task.recipe_of`.
        checkpoint: ``final``, ``newest``, ``best`` or a step (None: ``final/`` if the run has
            ended, else newest).
        weights: ``raw`` or the name of an EMA.
        sharded: Whether the model will be sharded (FSDP2).
        device: Type of the device.
        accept_changes: Accept data other than the training data.
        own_data: Whether the run's data is used; else a packaged task does not open it if the run
            has recorded its classes.

    Raises:
        ValueError: The weights are missing or damaged, the task cannot be created, or its data
            differs.
    """
    # Find the checkpoint.
    if weights.startswith("power:"):
        raise ValueError(
            f"--weights {weights}: only oneloop export can mix EMAs; give raw, or the name of "
            "a saved EMA"
        )
    chosen = chosen_of(run, checkpoint, weights=weights)

    if chosen.name == FINAL:
        named = "base" in read_manifest(chosen)["about"]
    else:
        named = base_model_of(chosen) is not None
    bare = _without_training(recipe, keeps_base=named)

    # Use the recorded classes, unless --task names another task.
    recorded = None if own_data else recorded_by(run).get("recorded")
    if recorded and recorded["task"] != recipe.task.name:
        recorded = None
    token = RECORDED.set(recorded or None)
    try:
        task = make_task(bare)
    finally:
        RECORDED.reset(token)
    if not (accept_changes or recorded):
        reject_changed_data(run, recipe, task)

    # Load the weights.
    built = build_model(bare, task, BatchLayout(1, 1), sharded=sharded, device=device)
    origin = getattr(task, "origin", None)
    reject_other_origin(chosen, origin)
    if named:
        round_frozen(built.model, recipe.machine.base_dtype)
    if chosen.name == FINAL:
        load_weights(built.model, str(chosen), weights, origin=origin)
    else:
        load_tensors(chosen, built.model, weights=weights, cast=True)
    load_task_state(task, chosen)
    if hasattr(task, "progress"):
        task.progress = Progress(lambda: 1, 1, 1)  # progress at the end of training

    # Describe the weights, and how the run evaluated them.
    about = f"{chosen.name} of {run}"
    if weights != "raw":
        about += f", {weights}"
    micro = recorded_by(run).get("eval_micro")
    if not isinstance(micro, int) or micro <= 0:
        micro = None
    return Trained(recipe, task, built, about, micro)


def _without_training(recipe: Recipe, *, keeps_base: bool) -> Recipe:
    """Return the recipe without what only training needs.

    ``keeps_base``: the run's weights do not replace those of a pretrained model."""
    machine = replace(recipe.machine, compile="none", recompute="none", offload=False)
    if machine.base_dtype != "float32":
        machine = replace(machine, base_dtype=None)
    task = recipe.task
    pretrained = task.options.get("pretrained") not in (None, False)
    if pretrained and not keeps_base and task.name in CHOICES["task"]:
        task = replace(task, options={**task.options, "pretrained": False})
    return replace(recipe, init=InitConfig(), machine=machine, task=task)


def reject_other_origin(folder: Path, origin: BaseModel | None) -> None:
    """Raise ValueError if a checkpoint was trained on another base model.

    Args:
        folder: the checkpoint, or ``final/``.
        origin: the base model of the task, or None.
    """
    if folder.name == FINAL:
        there = read_manifest(folder)["about"].get("base")
    else:
        there = base_model_of(folder)
    if (origin is None) != (there is None):
        raise ValueError(
            f"{folder} is of another model: only one of the two has a separate base model"
        )
    if origin is None:
        return
    other = origin.difference(there or {})
    if other:
        raise ValueError(
            f"{folder} needs the base model {other}; restore it at the path in task.model"
        )
