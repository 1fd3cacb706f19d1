"""Load the model of a run, with its weights, for another command."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.basics.untrusted import as_expected, read_json
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.named_checkpoint import FINAL, base_model_of, chosen_of
from oneloop.checkpoint.saved_state import read_state
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.store import Store
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.model import BuiltModel, build_model, torch_dtype
from oneloop.job.task import make_task
from oneloop.launch.before_imports import is_main
from oneloop.machine.frozen_dtype import rounded
from oneloop.recipe.class_paths import CHOICES, from_there, source
from oneloop.recipe.parse import read_again, task_name
from oneloop.recipe.schema import Recipe
from oneloop.recipe.training_keys import InitConfig
from oneloop.run.compatibility import data_differences, data_of
from oneloop.run.final_weights import load_task_state, reject_other_origin
from oneloop.run.saved_forms import FORMS
from oneloop.task_protocol.protocol import RECORDED, Progress, Task
from oneloop.tools.after_training.command import recipe_file

_RECORDED = {"task?": str, "recorded?": {"task": str}, "eval_micro?": int | None}


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
    name = task or _trusted(task_name(file), run)
    place = source("task", name) if is_main() else None
    if place:
        line = f"oneloop {command}: task.name {name} of {file} is imported from {place}"
        print(printable(line), file=sys.stderr)
    return read_again(file, task=name)


def _trusted(name: str, run: Path) -> str:
    """Return the run's task, or raise BadInput: the user must say whose code to run.

    A file is trusted if it is below the current directory, and not in the run folder."""
    if name in CHOICES["task"]:
        return name
    here = Path.cwd().resolve()
    there = run.resolve()
    recorded = Path(str(_recorded(run).get("task", "unknown"))).resolve()
    if recorded.is_relative_to(here) and not recorded.is_relative_to(there):
        name = from_there(name, recorded)

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
        f"{run}: its task {name} would be imported from {place}, {where}; to trust that file, "
        f"set {trust}"
    )


def _recorded(run: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = read_json(run / "environment.json", _RECORDED)
    except (OSError, ValueError):
        return {}
    return about


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
        recipe: Its recipe, from :func:`recipe_of`.
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
    recorded = None if own_data else _recorded(run).get("recorded")
    if recorded and recorded["task"] != recipe.task.name:
        recorded = None
    token = RECORDED.set(recorded or None)
    try:
        task = make_task(bare)
    finally:
        RECORDED.reset(token)
    if not (accept_changes or recorded):
        _reject_changed_data(run, recipe, task)

    # Load the weights.
    built = build_model(bare, task, BatchLayout(1, 1), sharded=sharded, device=device)
    origin = getattr(task, "origin", None)
    reject_other_origin(chosen, origin)
    if named:
        rounded(built.model, recipe.machine.base_dtype)
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
    micro = _recorded(run).get("eval_micro")
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


def _reject_changed_data(run: Path, recipe: Recipe, task: Task) -> None:
    """Raise ValueError if the data is not that of the training.

    Its classes and its validation split could differ."""
    sealed = Store(run / "checkpoints").sealed()
    there = None
    if sealed:
        with suppress(ValueError, KeyError):
            there = read_state(sealed[-1], FORMS)["identity"]
    if not there:
        why = "cannot be read, or was written by an older oneloop" if sealed else "is missing"
        if is_main():
            line = f"{run}: its newest checkpoint {why}: its data is not compared"
            print(printable(line), file=sys.stderr)
        return

    # Compare the fingerprints of the data.
    sets = {"train": task.train_set(), **task.eval_sets()}
    now = {"data": data_of(task, sets, seed=recipe.seed), "recipe": there["recipe"]}
    with as_expected("the record of the inputs in the newest checkpoint"):
        changed = data_differences(there, now)
    if changed:
        raise ValueError(
            f"{run} was trained with other data: {'; '.join(changed)}; restore it, or set "
            "--accept_changes (classes and held-out rows may differ)"
        )
