"""Training from Python: ``from oneloop import fit``."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.streams import lossy
from oneloop.launch.interpreter import borrowed
from oneloop.recipe.parse import recipe as recipe_of
from oneloop.recipe.schema import Recipe
from oneloop.run.entry import conduct, start_run
from oneloop.train import train


def fit(
    recipe: str | Recipe | Mapping[str, Any] | type | None = None,
    *,
    mixed_precision: str | None = None,
    **groups: Any,
) -> dict[str, Any]:
    """Train a recipe from Python, on all processes of the launcher.

    Call it in a script, a notebook, or a function that accelerate's ``notebook_launcher`` starts.

    >>> summary = fit("digits", batch={"size": 128}, run={"dir": "runs/larger"})
    >>> summary = fit(MyTask, duration="5ep", task={"width": 32})

    It writes the same files as the command line, and the same call resumes a stopped run.
    Afterwards it restores signal handlers, accelerate's shared state and the random generators.
    (Several processes keep their process group.)

    Args:
        recipe: a packaged name, the path of a YAML file, ``my_file.py:MyTask``, a task class, a
            :class:`oneloop.recipe.schema.Recipe`, or its keys by group; None: the defaults for
            ``groups["task"]``.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``; None: the launcher's setting.
        groups: keys of the recipe by group (``batch={"size": 128}``), or ``seed``, ``duration`` and
            ``track``.

    Returns:
        The summary, as in summary.json, on every rank. Its ``exit_code`` is 0, or 75 if
        ``stop.after`` or a STOP file ended the run. If the run had already finished, its earlier
        summary.

    Raises:
        BadInput: the input is invalid; nothing was written. (On the command line: exit code 2.)
        Diverged: a loss or gradient was not finite or spiked, and the policy is to stop. (3.)
        KeyboardInterrupt: after Ctrl-C and a save; after a second Ctrl-C, at once. SIGTERM, SIGUSR1
            and SIGHUP also stop and save; then they are raised again for their previous handlers.
        SampleError: a sample cannot be loaded; the original error is its cause. (1.)
        Exception: any other error, for example of the task's code, as it was raised. (1.)
    """
    # An error is raised after the state of the interpreter is restored.
    with borrowed("fit", mixed_precision):
        chosen = _read(recipe, groups)
        run = start_run(chosen, command=["oneloop.fit", f"{chosen.folder}/recipe.yaml"])
        output = redirect_stdout(lossy(sys.stdout))
        errors = redirect_stderr(lossy(sys.stderr))
        with run.stopping.listening(), output, errors:
            summary, fault = conduct(train, chosen, run)
    if fault is not None:
        raise fault
    return summary


def _read(recipe: Any, groups: dict[str, Any]) -> Recipe:
    """Return the recipe of the arguments of :func:`fit`."""
    if isinstance(recipe, Path):
        recipe = str(recipe)

    # The class of a task is a task.name; its arguments are in the same group.
    if isinstance(recipe, type):
        own = groups.get("task") or {}
        if not isinstance(own, Mapping) or "name" in own:
            raise BadInput(
                f"two tasks given, {recipe!r} and {own!r}; give the class, and its arguments "
                f"by task={{…}}"
            )
        groups = groups.copy()
        groups["task"] = {**own, "name": recipe}
        recipe = None
    elif not (recipe is None or isinstance(recipe, str | Recipe | Mapping)):
        raise BadInput(
            f"fit takes a recipe or the class of a task, got {recipe!r}; pass its arguments as "
            f"task={{…}}"
        )

    return recipe_of(recipe, **groups)
