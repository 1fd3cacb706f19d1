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
from oneloop.recipe.read import as_python, from_python, typed
from oneloop.recipe.schema import Recipe
from oneloop.run.entry import conduct, start_run
from oneloop.train import train

_LOCK = threading.Lock()
"""held by the running fit: accelerate's state and torch's generators are global"""


def fit(
    recipe: str | Recipe | Mapping[str, Any] | type | None = None, *, mixed_precision: str | None = None, **groups: Any
) -> dict[str, Any]:
    """Train a recipe from Python, on all processes of the launcher: in a script, a notebook, or a function that
    accelerate's ``notebook_launcher`` starts.

    >>> summary = fit("digits", batch={"size": 128}, run={"dir": "runs/larger"})
    >>> summary = fit(MyTask, duration="5ep", task={"width": 32})

    It writes the same files as the command line, and the same call resumes a stopped run. Afterwards it restores signal
    handlers, accelerate's shared state and the random generators. (Several processes keep their process group.)

    Args:
        recipe: a packaged name, the path of a YAML file, ``my_file.py:MyTask``, a task class, a
            :class:`oneloop.recipe.schema.Recipe`, or its keys by group; None: the defaults for ``groups["task"]``.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``; None: the launcher's setting.
        groups: keys of the recipe by group (``batch={"size": 128}``), or ``seed``, ``duration`` and ``track``.

    Returns:
        The summary, as in summary.json, on every rank. Its ``exit_code`` is 0, or 75 if ``stop.after`` or a STOP file
        ended the run. If the run had already finished, its earlier summary.

    Raises:
        BadInput: the input is invalid; nothing was written. (On the command line: exit code 2.)
        Diverged: a loss or gradient was not finite or spiked, and the policy is to stop. (3.)
        KeyboardInterrupt: after Ctrl-C and a save; after a second Ctrl-C, at once. SIGTERM, SIGUSR1 and SIGHUP also
            stop and save; then they are raised again for their previous handlers.
        SampleError: a sample cannot be loaded; the original error is its cause. (1.)
        Exception: any other error, for example of the task's code, as it was raised. (1.)
    """
    die_with_launcher()
    reject_while_importing()
    if not _LOCK.acquire(blocking=False):
        raise BadInput("another fit is under way in this process; wait for it, or start another process")
    try:
        source, typed, chosen = _read(recipe, groups)
        with borrowed(mixed_precision):
            run = start_run(chosen, command=["oneloop.fit", source or f"{chosen.folder}/recipe.yaml", *typed])
            with run.stopping.listening():
                summary, fault = conduct(train, chosen, run)
    except BadInput as error:
        raise BadInput(as_python(str(error))) from None  # the message alone
    finally:
        _LOCK.release()
    if fault is not None:
        raise fault
    return summary


def _read(recipe: Any, groups: dict[str, Any]) -> tuple[str, list[str], Recipe]:
    """Return the arguments as command-line words (source, overrides), and the recipe."""
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
