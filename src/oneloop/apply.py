"""What comes after training: ``python -m oneloop.apply evaluate|predict RUN …``, on one process or many."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from oneloop.basics import errors
from oneloop.basics.errors import BadInput
from oneloop.basics.files import dumps
from oneloop.basics.launcher import die_with_launcher
from oneloop.basics.words import parsed
from oneloop.evaluate import evaluate_all
from oneloop.machine.switches import float32_products
from oneloop.predict import ENDINGS, predictions, write
from oneloop.run.early import is_main, refuse
from oneloop.run.processes import Run, start
from oneloop.run.stopping import leave
from oneloop.run.trained import Trained, recipe_of, trained
from oneloop.tasks.base import check_sets

_COMMON: dict[str, str | bool | None] = {"--data": None, "--checkpoint": None, "--weights": "raw", "--micro": None}
_COMMON |= {"--accept_changes": False, "--task": None}
_OPTIONS: dict[str, dict[str, str | bool | None]] = {
    "evaluate": {**_COMMON, "--json": False},
    "predict": {**_COMMON, "--to": None, "--raw": False},
}


def main(argv: Sequence[str]) -> NoReturn:
    """Does what the words say, and ends the process with oneloop's exit code."""
    try:
        command, *words = argv or [""]
        if command not in _OPTIONS:
            raise BadInput(f"oneloop.apply: {command!r} is none of {', '.join(_OPTIONS)}")
        given = parsed(command, words, _OPTIONS[command])
        _check(command, given)
        recipe = recipe_of(Path(given["RUN"]), command=command, task=given["--task"])
        run = start(deterministic=recipe.machine.deterministic)
        float32_products(recipe.machine.matmul, benchmark=recipe.machine.cudnn_benchmark)
        about: dict[str, Any] = {"checkpoint": given["--checkpoint"], "weights": given["--weights"]}
        about |= {"accept_changes": given["--accept_changes"]}
        with run.setting_up():
            of = trained(Path(given["RUN"]), recipe, **about, sharded=run.sharded, device=run.device.type)
            sets = _sets(of, given["--data"], labelled=command == "evaluate")
        model = _prepared(of, run)
        options = {**of.options, **({"micro": int(given["--micro"])} if given["--micro"] else {})}
        with run.setting_up():
            if command == "evaluate":
                said = _evaluated(of, model, sets, run, options, as_json=given["--json"])
            else:
                said = _predicted(of, model, sets, run, options, Path(given["--to"]), raw=given["--raw"])
    except BadInput as error:
        refuse(error)
    if run.main:
        print(said, flush=True)
    leave(errors.DONE, main=is_main())


def _check(command: str, given: dict[str, Any]) -> None:
    """Refuses what can be seen to be wrong before anything is loaded."""
    if given["--micro"] is not None and not (given["--micro"].isdigit() and int(given["--micro"])):
        raise BadInput(f"oneloop {command}: --micro {given['--micro']} is no number of samples above 0")
    if command == "predict":
        if given["--to"] is None:
            raise BadInput("oneloop predict needs a file to write to: --to FILE.parquet, .jsonl or .csv")
        to = Path(given["--to"])
        if to.suffix not in ENDINGS:
            raise BadInput(f"--to {to} is none of {', '.join(ENDINGS)}; name the file so")
        if to.exists():
            raise BadInput(f"--to {to} exists; remove it, or name another file")
        if not to.parent.is_dir():
            raise BadInput(f"--to {to}: there is no folder {to.parent}; make it first")


def _sets(of: Trained, data: str | None, *, labelled: bool) -> dict[str, Any]:
    if data is None:
        own = of.task.eval_sets()
        sets = own if labelled else {name: own[name] for name in list(own)[:1]}
        if not sets:
            raise ValueError("the run's task has no validation set; name a place with --data")
    elif not hasattr(of.task, "samples_of"):
        raise ValueError(
            f"--data {data}: {type(of.task).__name__} has no samples_of(), which would open it; leave it out"
        )
    else:
        try:
            sets = {"data": of.task.samples_of(data, labelled=labelled)}
        except ValueError as error:
            raise ValueError(f"--data {data}: {str(error).removeprefix('task.data: ')}") from error
    check_sets(next(iter(sets.values())), sets)
    return sets


def _prepared(of: Trained, run: Run) -> nn.Module:
    if run.sharded:
        return run.prepare(of.model, blocks=of.built.blocks)
    prepared: nn.Module = run.accelerator.prepare_model(of.model, evaluation_mode=True)
    return prepared


def _evaluated(
    of: Trained, model: nn.Module, sets: dict[str, Any], run: Run, options: dict[str, Any], *, as_json: bool
) -> str:
    found = evaluate_all(of.task, model, sets, accelerator=run.accelerator, **options)
    assert found is not None
    figures = {"weights": of.about, **found["raw"]}
    if as_json:
        return dumps(figures)
    width = max(map(len, figures))
    return "\n".join(
        f"{name:{width}}  {value if isinstance(value, str) else f'{value:.6g}'}" for name, value in figures.items()
    )


def _predicted(
    of: Trained, model: nn.Module, sets: dict[str, Any], run: Run, options: dict[str, Any], to: Path, *, raw: bool
) -> str:
    ((_, dataset),) = sets.items()
    said = predictions(of.task, model, dataset, accelerator=run.accelerator, raw=raw, **options)
    try:
        rows = write(to, said, accelerator=run.accelerator)
    except OSError as error:
        raise ValueError(f"--to {to} cannot be written: {error.strerror}") from error
    warning = getattr(dataset, "warning", "")
    return f"{rows:,} rows of {of.about} are in {to}" + (f"\n{warning}" if warning else "")


if __name__ == "__main__":
    die_with_launcher()
    main(sys.argv[1:])
