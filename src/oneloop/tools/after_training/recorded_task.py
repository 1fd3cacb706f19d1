"""The recipe, the task and the data that a run has recorded, and whose code it would run."""

import sys
from pathlib import Path
from typing import Any

from oneloop.basics.differences import differences, listed
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import printable
from oneloop.basics.untrusted import damaged, read_json
from oneloop.launch.before_imports import is_main
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.recipe.parse import load, recipe
from oneloop.recipe.schema import Recipe
from oneloop.run.compatibility import data_inputs
from oneloop.task_protocol.protocol import Task
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
    _, written = load(str(file))
    name = task or _trusted(written.get("task.name"), run)
    place = source("task", name) if is_main() else None
    if place:
        line = f"oneloop {command}: task.name {name} of {file} is imported from {place}"
        print(printable(line), file=sys.stderr)

    # The optimizer and the schedule are not needed.
    for key in list(written):
        if key.startswith(("optimizer.", "schedule.")):
            del written[key]
    return recipe(written | {"task.name": name})


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
