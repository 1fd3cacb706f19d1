"""After training, from Python: ``from oneloop import evaluate, export, predict, report``."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import required
from oneloop.basics.launcher import ranks
from oneloop.checkpoint.mirror import local_run
from oneloop.launch.interpreter import borrowed
from oneloop.recipe.class_paths import path_of

Run = str | Path | Mapping[str, Any]


def evaluate(
    run: Run,
    *,
    mixed_precision: str | None = None,
    **options: Any,
) -> dict[str, Any]:
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
    with borrowed("evaluate", mixed_precision):
        perform = required("evaluate or predict").perform
        return dict(perform("evaluate", _options("evaluate", run, options))[1])


def predict(
    run: Run,
    *,
    to: str | Path | None = None,
    mixed_precision: str | None = None,
    **options: Any,
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
    with borrowed("predict", mixed_precision), TemporaryDirectory(prefix="oneloop-") as scratch:
        if to is None and ranks() > 1:
            raise BadInput(
                "predict on several processes needs a file to write to: to='predictions.jsonl'"
            )

        # Without a file, write to a temporary one and read it.
        file = Path(to or f"{scratch}/rows.jsonl")
        prediction = required("evaluate or predict")
        prediction.check_file(file)
        prediction.perform("predict", _options("predict", run, {**options, "to": file}))
        if to is not None:
            return file
        return [json.loads(line) for line in file.read_text().splitlines()]


def export(
    run: Run,
    *,
    to: str | Path | None = None,
    push: str | None = None,
    **options: Any,
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
    with borrowed("export"):
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
