"""Evaluate and predict after training, on one or more processes.

``python -m oneloop.tools.after_training.evaluate_and_predict evaluate|predict RUN …``
"""

import sys

if __name__ == "__main__":  # before the imports that a system could lack
    from oneloop.basics.system import exit_if_not_supported

    exit_if_not_supported()

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import dumps, writing
from oneloop.basics.launcher import die_with_launcher
from oneloop.basics.streams import replace_unknown_characters
from oneloop.evaluation import evaluate_all
from oneloop.launch.before_imports import reject
from oneloop.launch.processes import Run, start
from oneloop.launch.signals import leave
from oneloop.machine.torch_settings import float32_products
from oneloop.run.before_run import before_run
from oneloop.tools.after_training.data_sets import generation_of, sets_of
from oneloop.tools.after_training.initial_model import initial_model
from oneloop.tools.after_training.options import check_file as check_file
from oneloop.tools.after_training.options import parsed
from oneloop.tools.after_training.prediction import predictions, write
from oneloop.tools.after_training.recorded_task import recipe_of
from oneloop.tools.after_training.trained_model import Trained, trained


def perform(command: str, given: Namespace) -> tuple[Run, Any]:
    """Evaluate or predict. Collective: call on every rank.

    Args:
        command: ``evaluate`` or ``predict``.
        given: The options of :func:`parsed`.

    Returns:
        The processes, and the metrics of ``evaluate`` or a line about the file of ``predict``.

    Raises:
        BadInput: The run, the data or an option is invalid.
    """
    recipe = recipe_of(given.run, command=command, task=given.task)
    machine = recipe.machine
    run = start(device=given.device or machine.device, deterministic=machine.deterministic)
    float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
    evaluates = command == "evaluate"

    # Load the model and the data; with a wrong input, all ranks raise the same error.
    with run.setting_up():
        of = trained(
            given.run,
            recipe,
            checkpoint=given.checkpoint,
            weights=given.weights,
            sharded=run.sharded,
            device=run.device.type,
            accept_changes=given.accept_changes,
            own_data=evaluates or given.data is None,
        )
        sets = sets_of(of.task, given.data, labelled=evaluates)

    model = run.prepare_frozen(of.model, names=recipe.machine.blocks)
    before_run(of.task, model, run, sets=sets, initial_model=partial(initial_model, of, run))
    options = of.options
    if given.micro:
        options["micro"] = given.micro
    with run.setting_up():
        if not evaluates:
            return run, _predicted(of, model, sets, run, options, given.to, raw=given.raw)
        # A loss over a whole batch is evaluated in windows of the training's batch size.
        options["window"] = recipe.batch.size
        options["generation"] = generation_of(
            of.task, sets, given.generate or recipe.eval.generate, given.micro or recipe.eval.micro
        )
        found = evaluate_all(of.task, model, sets, accelerator=run.accelerator, **options)
        assert found is not None
        return run, {"weights": of.about, **found["raw"]}


def main(argv: Sequence[str]) -> NoReturn:
    """Run ``evaluate`` or ``predict``; end the process with oneloop's exit code."""
    try:
        command, *words = argv or [""]
        given = parsed(command, words)
    except (BadInput, Unavailable) as error:
        reject(error)
    run(given)


def run(given: Namespace) -> NoReturn:
    """Run the command of these options; end the process with oneloop's exit code."""
    try:
        processes, result = perform(given.command, given)
    except (BadInput, Unavailable) as error:
        reject(error)
    if processes.main:
        if given.command == "evaluate":
            result = dumps(result) if given.json else _table(result)
        print(result, flush=True)
    leave(exit_codes.DONE, main=processes.main)


def _table(metrics: Mapping[str, Any]) -> str:
    width = max(map(len, metrics))
    lines = []
    for name, value in metrics.items():
        text = value if isinstance(value, str) else f"{value:.6g}"
        lines.append(f"{name:{width}}  {text}")
    return "\n".join(lines)


def _predicted(
    of: Trained,
    model: nn.Module,
    sets: dict[str, Any],
    run: Run,
    options: dict[str, Any],
    to: Path,
    *,
    raw: bool,
) -> str:
    ((_, dataset),) = sets.items()
    result = predictions(of.task, model, dataset, accelerator=run.accelerator, raw=raw, **options)
    with writing(f"--to {to}", "make room, or name another file"):
        rows = write(to, result, accelerator=run.accelerator)
    line = f"{rows:,} rows of {of.about} are in {to}"
    warning = getattr(dataset, "warning", "")
    return f"{line}\n{warning}" if warning else line


if __name__ == "__main__":
    die_with_launcher()
    replace_unknown_characters()
    main(sys.argv[1:])
