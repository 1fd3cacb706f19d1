"""Is the data of a run that of its training? Its classes and its validation split could differ."""

import sys
from contextlib import suppress
from pathlib import Path

from oneloop.basics.files import printable
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.saved_state import read_state
from oneloop.checkpoint.store import Store
from oneloop.launch.before_imports import is_main
from oneloop.recipe.schema import Recipe
from oneloop.run.compatibility import data_differences, data_of
from oneloop.task_protocol.protocol import Task


def reject_changed_data(run: Path, recipe: Recipe, task: Task) -> None:
    """Raise ValueError if the data is not that of the training.

    Its classes and its validation split could differ."""
    sealed = Store(run / "checkpoints").sealed()
    there = None
    if sealed:
        with suppress(ValueError), damaged(sealed[-1]):
            there = dict(read_state(sealed[-1])["identity"])
    if not there:
        why = "cannot be read" if sealed else "is missing"
        if is_main():
            line = f"{run}: its newest checkpoint {why}: its data is not compared"
            print(printable(line), file=sys.stderr)
        return

    # Compare the fingerprints of the data.
    sets = {"train": task.train_set(), **task.eval_sets()}
    now = {"data": data_of(task, sets, seed=recipe.seed), "recipe": there.get("recipe")}
    with damaged("the record of the inputs in the newest checkpoint"):
        changed = data_differences(there, now)
    if changed:
        raise ValueError(
            f"{run} was trained with other data: {'; '.join(changed)}; restore it, or set "
            "--accept_changes (classes and held-out rows may differ)"
        )
