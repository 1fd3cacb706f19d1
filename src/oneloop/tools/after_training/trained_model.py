"""The recipe, the task and the model of a run, with its weights, for another command."""

import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import BaseModel
from oneloop.basics.differences import differences, listed
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.basics.untrusted import damaged, read_json
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.named_checkpoint import FINAL, base_model_of, chosen_of
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.model import build_model, torch_dtype
from oneloop.job.task import make_task
from oneloop.launch.before_imports import is_main
from oneloop.launch.processes import Run
from oneloop.machine.frozen_dtype import in_four_bits
from oneloop.recipe import parse
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.recipe.schema import InitConfig, Recipe
from oneloop.run.compatibility import data_inputs
from oneloop.run.final_weights import load_task_state
from oneloop.task_protocol.protocol import RECORDED, Progress, Task
from oneloop.tools.after_training.options import recipe_file


def recipe_of(run: Path, *, command: str, task: str | None = None) -> Recipe:
    """Return the recipe of a run; print the file of its task, if it is the user's.

    Args:
        run: The run folder.
        command: Name of the command, for the line.
        task: Overrides the recorded task; you must trust its file.

    Raises:
        BadInput: The run folder has no recipe.
    """
    file = recipe_file(run)
    _, written = parse.load(str(file))
    name = task or _trusted(written.get("task.name"), run)
    place = source("task", name) if is_main() else None
    if place:
        line = f"oneloop {command}: task.name {name} of {file} is imported from {place}"
        print(printable(line), file=sys.stderr)

    # Leave out what only training needs.
    for key in list(written):
        if key.startswith(("optimizer.", "schedule.")):
            del written[key]
    recipe = parse.recipe(written | {"task.name": name})
    machine = replace(recipe.machine, compile="none", recompute="none", offload=False)
    return replace(recipe, machine=machine)


def _trusted(name: object, run: Path) -> str:
    """Return the run's task, or raise BadInput: the user must say whose code to run.

    A file is trusted if it is below the current directory, and not in the run folder."""
    if not isinstance(name, str):
        raise BadInput(f"{run}: task.name must be a name or a class path, found {name!r}")
    if name in CHOICES["task"]:
        return name
    here = Path.cwd().resolve()
    there = run.resolve()
    recorded = Path(str(recorded_by(run).get("task", "unknown"))).resolve()
    if recorded.is_relative_to(here) and not recorded.is_relative_to(there):
        name = _from_there(name, recorded)

    # Find the file that would be imported; None: an installed module.
    place = source("task", name)
    if ":" in name and recorded.is_file() and place is not None and not place.exists():
        place = recorded  # imported from its recorded path
    elif place is None or not (
        place.is_relative_to(there) or (":" in name and not place.is_relative_to(here))
    ):
        return name

    where = "which is not below the current folder"
    if place.is_relative_to(there):
        where = "which is in the run folder"
    trust = f"--task {place}:{name.rpartition(':')[2].rpartition('.')[2]}"
    raise BadInput(
        f"{run}: the task {name} would be imported from the file {place}, {where}; to trust it, "
        f"set {trust}"
    )


def _from_there(name: str, recorded: Path) -> str:
    """Return a name by which ``class_paths.resolve`` finds a class of an earlier run.

    Args:
        name: by which that run found it.
        recorded: the file of the class at that time, which may not exist any more.
    """
    if not recorded.is_file() or recorded.suffix != ".py":
        return name
    if ":" in name:
        return f"{recorded}:{name.rpartition(':')[2]}"
    root = str(recorded.parent.parent if recorded.name == "__init__.py" else recorded.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return name


def recorded_by(run: Path) -> dict[str, Any]:
    """Return what environment.json says about task and evaluation; empty if it cannot be read."""
    try:
        with damaged("environment.json"):
            about: dict[str, Any] = read_json(run / "environment.json")
            recorded = dict(about.get("recorded") or {})
            about["inputs"] = dict(about.get("inputs") or {})
            return about | {"recorded": recorded and {**recorded, "task": str(recorded["task"])}}
    except (OSError, ValueError):
        return {}


def reject_changed_data(run: Path, recipe: Recipe, task: Task) -> None:
    """Raise ValueError if the data is not that of the training.

    Its classes and its validation split could differ."""
    inputs = recorded_by(run).get("inputs", {})
    before = {name: text for name, text in inputs.items() if " set, " in name}
    if not before:
        if is_main():
            line = f"{run}: its environment.json does not name its data, which is not compared"
            print(printable(line), file=sys.stderr)
        return
    sets = {"train": task.train_set(), **task.eval_sets()}
    changed = differences(before, data_inputs(task, sets, seed=recipe.seed))
    if changed:
        raise ValueError(
            f"{run} was trained with other data: {listed(changed)}; restore it, or set "
            "--accept_changes (classes and held-out rows may differ)"
        )


@dataclass(frozen=True)
class Trained:
    """The task and the model of a run."""

    recipe: Recipe
    task: Task
    model: nn.Module  # not yet wrapped for distributed execution
    about: str  # describes the weights in messages
    options: dict[str, Any]  # of an evaluation: micro-batch size, dtype, seed and pinned memory


def trained(given: Namespace, recipe: Recipe, processes: Run, *, own_data: bool) -> Trained:
    """Return task and model of a run.

    Args:
        given: The options of ``evaluate`` or ``predict``.
        recipe: That of the run, from :func:`recipe_of`.
        processes: They will run the model.
        own_data: Whether the run's data is used; else a packaged task does not open it if the run
            has recorded its classes.

    Raises:
        ValueError: The weights are missing or damaged, the task cannot be created, or its data
            differs.
    """
    run = given.run
    weights = given.weights

    # Find the checkpoint.
    if weights.startswith("power:"):
        raise ValueError(
            f"--weights {weights}: only oneloop export can mix EMAs; give raw, or the name of "
            "a saved EMA"
        )
    chosen = chosen_of(run, given.checkpoint, weights=weights)
    named = _base_of(chosen) is not None
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
    if not (given.accept_changes or recorded):
        reject_changed_data(run, recipe, task)

    # Load the weights.
    model = _built(bare, task, processes)
    origin = getattr(task, "origin", None)
    reject_other_origin(chosen, origin)
    if named:
        round_frozen(model, recipe.machine.base_dtype)
    if chosen.name == FINAL:
        load_weights(model, str(chosen), weights, origin=origin)
    else:
        load_tensors(chosen, model, weights=weights, cast=True)
    load_task_state(task, chosen)
    if hasattr(task, "progress"):
        task.progress = Progress(lambda: 1, 1, 1)  # progress at the end of training

    # Another micro-batch size than in the run's evaluations pads texts differently, which changes
    # rounding.
    evaluated = recorded_by(run).get("eval_micro")
    if not isinstance(evaluated, int) or evaluated <= 0:
        evaluated = recipe.batch.micro
    if not isinstance(evaluated, int):
        evaluated = min(recipe.batch.size, 64)
    options = {
        "micro": given.micro or recipe.eval.micro or evaluated,
        "dtype": torch_dtype(recipe),
        "seed": recipe.seed,
        "pinned": recipe.machine.pinned,
    }
    about = f"{chosen.name} of {run}"
    if weights != "raw":
        about += f", {weights}"
    return Trained(recipe, task, model, about, options)


def _built(recipe: Recipe, task: Task, processes: Run) -> nn.Module:
    layout = BatchLayout(1, 1)
    device = processes.device.type
    return build_model(recipe, task, layout, sharded=processes.sharded, device=device).model


def _without_training(recipe: Recipe, *, keeps_base: bool) -> Recipe:
    """Return the recipe without what the run's own weights replace.

    ``keeps_base``: the run's weights do not replace those of a pretrained model."""
    machine = recipe.machine
    if machine.base_dtype != "float32":
        machine = replace(machine, base_dtype=None)
    task = recipe.task
    pretrained = task.options.get("pretrained") not in (None, False)
    if pretrained and not keeps_base and task.name in CHOICES["task"]:
        task = replace(task, options={**task.options, "pretrained": False})
    return replace(recipe, init=InitConfig(), machine=machine, task=task)


def _base_of(folder: Path) -> Any:
    """Return the base model that a checkpoint, or ``final/``, refers to; None if there is none."""
    if folder.name == FINAL:
        return read_manifest(folder)["about"].get("base")
    return base_model_of(folder)


def reject_other_origin(folder: Path, origin: BaseModel | None) -> None:
    """Raise ValueError if a checkpoint was trained on another base model.

    Args:
        folder: the checkpoint, or ``final/``.
        origin: the base model of the task, or None.
    """
    there = _base_of(folder)
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


def round_frozen(model: nn.Module, dtype: str | None) -> None:
    """Round frozen float32 matrices to ``dtype`` in place, and keep them stored in float32.

    Args:
        model: not yet wrapped or sharded.
        dtype: None: unchanged.
    """
    if dtype is None:
        return
    rounding: torch.dtype = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.requires_grad or in_four_bits(parameter):
            continue
        # as hold_frozen does
        if parameter.dtype is torch.float32 and parameter.ndim >= 2:
            parameter.data = parameter.data.to(rounding).float()


def initial_model(of: Trained, run: Run) -> nn.Module:
    """Return the model of a run before its first step, prepared. Collective under FSDP2.

    Raises:
        ValueError: its initial weights are missing, or cannot be read.
    """
    recipe = of.recipe
    if recipe.task.name in CHOICES["task"]:
        # The trained weights needed no others, but these may begin with those of a base model.
        vars(of.task)["pretrained"] = recipe.task.options.get("pretrained")
    try:
        model = _built(recipe, of.task, run)
    except ValueError as error:
        raise ValueError(
            f"the model before the first step is needed, and it cannot be loaded: {error}; "
            "restore its weights"
        ) from error
    return run.prepare_frozen(model, names=recipe.machine.blocks)
