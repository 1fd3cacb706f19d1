"""oneloop from Python: ``from oneloop import fit``."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.launcher import die_with_launcher
from oneloop.launch.interpreter import borrowed
from oneloop.recipe.class_paths import reject_while_importing
from oneloop.recipe.parse import recipe as recipe_of
from oneloop.recipe.read import from_python, typed
from oneloop.recipe.schema import Recipe
from oneloop.run.entry import conduct, start_run
from oneloop.train import train

_ONE = threading.Lock()
"""held by the fit that is under way: accelerate's state, and torch's generators, are the process's"""


def fit(
    recipe: str | Recipe | Mapping[str, Any] | type | None = None, *, mixed_precision: str | None = None, **groups: Any
) -> dict[str, Any]:
    """Trains a recipe on the processes that this one was started with, and returns: in a script, a notebook, or a
    function that accelerate's ``notebook_launcher`` starts.

    >>> summary = fit("digits", batch={"size": 128}, run={"dir": "runs/larger"})
    >>> summary = fit(MyTask, duration="5ep", task={"width": 32})

    All that lands on disk is what the command line leaves, and the same call goes on where a run was stopped. The
    interpreter stays as it was: no handlers and no shared state of accelerate are left behind, the random generators
    are where they were. (Several processes keep their process group, for the next call.)

    Args:
        recipe: a packaged name, the path of a YAML file, ``my_file.py:MyTask``, a task class, a
            :class:`oneloop.recipe.schema.Recipe`, or its keys by group; None: the defaults, for a ``task`` in
            ``groups``.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``; None: as the launcher says.
        groups: keys of the recipe by group (``batch={"size": 128}``), or ``seed``, ``duration`` and ``track``.

    Returns:
        The summary, as in summary.json, on every rank. Its ``exit_code`` is 0, or 75 where ``stop.after`` or a STOP
        file ended the run, and of a run that had finished before, what it was.

    Raises:
        BadInput: what was asked cannot be done; nothing was written. (Exit code 2.)
        Diverged: a loss or gradient was not finite, and the policy is to stop. (3.)
        KeyboardInterrupt: a Ctrl-C, after saving; a second one at once. Other signals that the command line listens to
            (SIGTERM, SIGUSR1, SIGHUP) are passed on in the same way, after saving, to whoever had them before.
        SampleError: a sample cannot be loaded; its cause is what was raised (1).
        Exception: what else ends a run (1): of the task's own code as it was raised.
    """
    die_with_launcher()
    reject_while_importing()
    if not _ONE.acquire(blocking=False):
        raise BadInput("another fit is under way in this process; wait for it, or start another process")
    try:
        source, typed, chosen = _read(recipe, groups)
        with borrowed(mixed_precision):
            run = start_run(chosen, command=["oneloop.fit", source or f"{chosen.folder}/recipe.yaml", *typed])
            with run.stopping.listening():
                summary, fault = conduct(train, chosen, run)
    except BadInput as error:
        raise BadInput(str(error)) from None  # its sentence is enough
    finally:
        _ONE.release()
    if fault is not None:
        raise fault
    return summary


def _read(recipe: Any, groups: dict[str, Any]) -> tuple[str, list[str], Recipe]:
    """What was asked for as it would be typed, and the recipe."""
    if isinstance(recipe, Path):
        recipe = str(recipe)
    if isinstance(recipe, type):
        own = groups.get("task") or {}
        if not isinstance(own, Mapping) or "name" in own:
            raise BadInput(f"two tasks given, {recipe!r} and {own!r}; give the class, and its arguments by task={{…}}")
        groups = {**groups, "task": {**own, "name": recipe}}
        recipe = None
    elif not (recipe is None or isinstance(recipe, str | Recipe | Mapping)):
        raise BadInput(f"fit takes a recipe or the class of a task, got {recipe!r}; pass its arguments as task={{…}}")
    given = from_python(groups)
    source = recipe if isinstance(recipe, str) else given.get("task.name", "") if recipe is None else ""
    words = [word for key, value in sorted(given.items()) if value != source for word in (f"--{key}", typed(value))]
    return str(source), words, recipe_of(recipe, **groups)
