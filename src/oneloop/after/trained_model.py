"""Load the model of a run, with its weights, for another command."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.checkpoint.mirror import local_run as local_run
from oneloop.checkpoint.named_checkpoint import FINAL, base_model_of, chosen_of
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.store import Store, read_manifest
from oneloop.checkpoint.weights import load_weights
from oneloop.data.batch_layout import BatchLayout
from oneloop.job.build import make_task
from oneloop.job.model import BuiltModel, build_model, torch_dtype
from oneloop.launch.before_imports import is_main
from oneloop.machine.frozen_dtype import rounded
from oneloop.recipe.class_paths import CHOICES, from_there, source
from oneloop.recipe.parse import read_again, task_name
from oneloop.recipe.schema import Recipe
from oneloop.recipe.training_keys import InitConfig
from oneloop.run.compatibility import data_differences, data_of
from oneloop.run.export import load_task_state, reject_other_origin
from oneloop.tasks.labels import RECORDED
from oneloop.tasks.protocol import Progress, Task


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
        return self.built.model

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for evaluation: micro-batch size, dtype and seed."""
        recipe = self.recipe
        own = (
            recipe.batch.micro
            if isinstance(recipe.batch.micro, int)
            else min(recipe.batch.size, 64)
        )
        return {
            "micro": recipe.eval.micro or self.eval_micro or own,
            "dtype": torch_dtype(recipe),
            "seed": recipe.seed,
        }


def recipe_of(run: Path, *, command: str, task: str | None = None) -> Recipe:
    """Return the recipe of a run for ``command``; print the file from which its task is imported,
    if it is the user's.

    ``task`` overrides the recorded task (None), and you must trust its file. Raise BadInput if
    there is no recipe."""
    file = run / "recipe.yaml"
    if not file.is_file():
        raise BadInput(f"{run} holds no run (no recipe.yaml)")
    name = task or _trusted(task_name(file), run)
    if is_main() and (place := source("task", name)):
        print(
            printable(f"oneloop {command}: task.name {name} of {file} is imported from {place}"),
            file=sys.stderr,
        )
    return read_again(file, task=name)


def _trusted(name: str, run: Path) -> str:
    """Return the run's task if its file is below the current directory and not in the run folder,
    else raise BadInput: the user must say whose code to run."""
    if name in CHOICES["task"]:
        return name
    here, there = Path.cwd().resolve(), run.resolve()
    recorded = Path(str(_recorded(run).get("task", "unknown"))).resolve()
    if recorded.is_relative_to(here) and not recorded.is_relative_to(there):
        name = from_there(name, recorded)
    place = source("task", name)
    if ":" in name and recorded.is_file() and place is not None and not place.exists():
        place = recorded  # imported from its recorded path
    elif place is None or not (
        place.is_relative_to(there) or (":" in name and not place.is_relative_to(here))
    ):
        return name
    where = (
        "which is in the run folder"
        if place.is_relative_to(there)
        else "which is not below the current folder"
    )
    trust = f"--task {place}:{name.rpartition(':')[2].rpartition('.')[2]}"
    raise BadInput(
        f"{run}: its task {name} would be imported from {place}, {where}; to trust that file, "
        f"set {trust}"
    )


def _recorded(run: Path) -> dict[str, Any]:
    try:
        about = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


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

    ``checkpoint`` is ``final``, ``newest``, ``best`` or a step (None: ``final/`` if the run has
    ended, else newest), ``weights`` ``raw`` or the name of an EMA. ``accept_changes`` accepts data
    other than the training data. Without ``own_data``, a packaged task does not open its data if
    the run has recorded its classes. Raise ValueError if the weights are missing or damaged, the
    task cannot be created, or its data differs."""
    if weights.startswith("power:"):
        raise ValueError(
            f"--weights {weights}: only oneloop export can mix EMAs; give raw, or the name of "
            "a saved EMA"
        )
    chosen = chosen_of(run, checkpoint, weights=weights)
    plain = replace(recipe.machine, compile="none", recompute="none", offload=False)
    if plain.base_dtype != "float32":
        plain = replace(plain, base_dtype=None)
    options = recipe.task.options
    named = (
        "base" in read_manifest(chosen)["about"]
        if chosen.name == FINAL
        else base_model_of(chosen) is not None
    )
    if (
        not named
        and recipe.task.name in CHOICES["task"]
        and options.get("pretrained") not in (None, False)
    ):
        options = {**options, "pretrained": False}  # the run's weights replace the pretrained ones
    bare = replace(
        recipe, init=InitConfig(), machine=plain, task=replace(recipe.task, options=options)
    )
    recorded = None if own_data else _recorded(run).get("recorded")
    # --task may name another task
    recorded = recorded if recorded and recorded["task"] == recipe.task.name else None
    token = RECORDED.set(recorded)
    try:
        task = make_task(bare)
    finally:
        RECORDED.reset(token)
    if not (accept_changes or recorded):
        _reject_changed_data(run, recipe, task)
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
    micro = _recorded(run).get("eval_micro")
    about = f"{chosen.name} of {run}{'' if weights == 'raw' else f', {weights}'}"
    return Trained(
        recipe, task, built, about, micro if isinstance(micro, int) and micro > 0 else None
    )


def _reject_changed_data(run: Path, recipe: Recipe, task: Task) -> None:
    """Raise ValueError if the data differs from the training data: classes and validation split
    could differ."""
    sealed = Store(run / "checkpoints").sealed()
    try:
        there = json.loads((sealed[-1] / "state.json").read_text())["identity"] if sealed else None
    except (OSError, ValueError, KeyError):
        there = None
    if not there:
        if is_main():
            why = "cannot be read, or was written by an older oneloop" if sealed else "is missing"
            print(
                printable(f"{run}: its newest checkpoint {why}: its data is not compared"),
                file=sys.stderr,
            )
        return
    sets = {"train": task.train_set(), **task.eval_sets()}
    now = {"data": data_of(task, sets, seed=recipe.seed), "recipe": there["recipe"]}
    if changed := data_differences(there, now):
        ways = "restore it, or set --accept_changes (classes and held-out rows may differ)"
        raise ValueError(f"{run} was trained with other data: {'; '.join(changed)}; {ways}")
