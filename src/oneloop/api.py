"""oneloop from Python: ``from oneloop import evaluate, export, fit, predict, report``."""

from oneloop.basics.system import check_system

check_system()  # before the imports that a system could lack

import json
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import required
from oneloop.basics.launcher import die_with_launcher, ranks
from oneloop.basics.streams import lossy
from oneloop.checkpoint.mirror import local_run
from oneloop.launch.interpreter import borrowed
from oneloop.recipe.class_paths import path_of, reject_while_importing
from oneloop.recipe.parse import recipe as recipe_of
from oneloop.recipe.schema import Recipe
from oneloop.run.entry import conduct, start_run
from oneloop.train import train

Run = str | Path | Mapping[str, Any]
# held by the running call: accelerate's state and torch's generators are global
_LOCK = threading.Lock()


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
    with _alone("fit"):
        chosen = _read(recipe, groups)
        with borrowed(mixed_precision):
            run = start_run(chosen, command=["oneloop.fit", f"{chosen.folder}/recipe.yaml"])
            output = redirect_stdout(lossy(sys.stdout))
            errors = redirect_stderr(lossy(sys.stderr))
            with run.stopping.listening(), output, errors:
                summary, fault = conduct(train, chosen, run)
    if fault is not None:
        raise fault
    return summary


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Reject a second call in this process. Of BadInput, only the message is raised."""
    die_with_launcher()
    reject_while_importing()
    if not _LOCK.acquire(blocking=False):
        raise BadInput(
            f"{name}: another call of oneloop is under way in this process; wait for it to end"
        )
    try:
        yield
    except BadInput as error:
        raise BadInput(str(error)) from None
    finally:
        _LOCK.release()


def evaluate(run: Run, *, mixed_precision: str | None = None, **options: Any) -> dict[str, Any]:
    """Return loss and metrics of a run's weights, as ``oneloop evaluate`` prints them.

    Collective: call on every rank.

    >>> evaluate("runs/digits", data="new/")["data/accuracy"]

    Args:
        run: the run folder, or the summary that :func:`fit` returned.
        mixed_precision: as in :func:`fit`.
        options: ``data``, ``checkpoint``, ``weights``, ``micro``, ``generate``, ``device``,
            ``accept_changes`` and ``task`` of the command; a task may be a class.

    Raises:
        BadInput: the run, the data or an option is invalid.
    """
    with _alone("evaluate"), borrowed(mixed_precision):
        perform = required("evaluate or predict").perform
        return dict(perform("evaluate", _options("evaluate", run, options))[1])


def predict(
    run: Run, *, to: str | Path | None = None, mixed_precision: str | None = None, **options: Any
) -> list[dict[str, Any]] | Path:
    """Predict every row of a run's validation set, or of other ``data``, in order.

    Collective: call on every rank.

    Args:
        run: the run folder, or the summary that :func:`fit` returned.
        to: the file to write (.parquet, .jsonl or .csv); None, on one process: return the rows.
        mixed_precision: as in :func:`fit`.
        options: as in :func:`evaluate`, and ``raw`` of the command.

    Returns:
        The rows as dicts, or the path ``to``.

    Raises:
        BadInput: the run, the data, an option or ``to`` is invalid.
    """
    with _alone("predict"), TemporaryDirectory(prefix="oneloop-") as scratch:
        if to is None and ranks() > 1:
            raise BadInput(
                "predict on several processes needs a file to write to: to='predictions.jsonl'"
            )

        # Without a file, write to a temporary one and read it.
        file = Path(to or f"{scratch}/rows.jsonl")
        prediction = required("evaluate or predict")
        prediction.check_file(file)
        with borrowed(mixed_precision):
            prediction.perform("predict", _options("predict", run, {**options, "to": file}))
        if to is not None:
            return file
        return [json.loads(line) for line in file.read_text().splitlines()]


def export(
    run: Run, *, to: str | Path | None = None, push: str | None = None, **options: Any
) -> str:
    """Write a run's weights to the folder ``to``, or ``push`` them to the hub; return a line.

    Args:
        run: the run folder, or the summary that :func:`fit` returned.
        to: the folder to write to.
        push: the repository of the hub, ``ORG/NAME``.
        options: ``checkpoint``, ``weights``, ``merged``, ``task``, ``public`` and ``license`` of
            ``oneloop export``.

    Raises:
        BadInput: the run or an option is invalid.
    """
    given = {**options, "to": None if to is None else Path(to), "push": push}
    with _alone("export"), borrowed(None):
        return "\n".join(required("export").export_run(_options("export", run, given)))


def report(*runs: Run, to: str | Path | None = None) -> Path:
    """Write one HTML page about a run, or about several runs in the same charts; return its path.

    Args:
        runs: run folders, or summaries that :func:`fit` returned.
        to: the file to write; None: report.html in the folder of the only run, or in the current
            folder.

    Raises:
        BadInput: a run cannot be read.
    """
    folders = [_folder(run) for run in runs]
    page: Path = required("the report page").write_report(folders, None if to is None else Path(to))
    return page


def _options(command: str, run: Run, given: dict[str, Any]) -> Namespace:
    """Return the options of a command, as its parser reads them.

    Raise TypeError for an unknown one, as Python does."""
    parser = required(command).parser_of(command)
    folder = run["folder"] if isinstance(run, Mapping) else run
    words = [str(folder)]
    for name, value in given.items():
        if name not in parser.names:
            raise TypeError(f"{command}() got an unexpected keyword argument {name!r}")
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            text = path_of(value) if isinstance(value, type) else str(value)
            words.append(f"--{name}={text}")
    options: Namespace = parser.parse_args(words)
    return options


def _folder(run: Run) -> Path:
    return local_run(run["folder"] if isinstance(run, Mapping) else run)


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
