"""The options of ``evaluate`` and ``predict``, checked before torch is imported."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from oneloop.basics.command_options import Options, positive
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import reject_run_folder
from oneloop.checkpoint.mirror import local_run

ENDINGS = (".parquet", ".jsonl", ".csv")  # of files with predictions
_PAGES = {
    "evaluate": (
        "Print loss and metrics of a run's weights on its own validation and test sets, "
        "or on other data."
    ),
    "predict": """Write the prediction for each row of its validation set, or of other data, \
to a file, in order.

    A row has its number, the file name of an image, and the task's columns.""",
}
_MORE = """
    Data that does not match the training data is rejected. Several processes share the work:

      oneloop launch --config_file ddp predict runs/digits --data new/ --to predictions.csv"""


def parser_of(command: str) -> Options:
    """Return the parser of ``evaluate`` or ``predict``."""
    options = Options(command, f"{_PAGES[command]}\n{_MORE}")

    # Options of both commands.
    options.add_argument("run", type=local_run, metavar="RUN")
    options.add_argument("--data", metavar="DATA", help="rows to use instead of the run's own sets")
    options.add_argument(
        "--checkpoint", help="final, best, newest or a step; default: final if the run has ended"
    )
    options.add_argument("--weights", default="raw", help="raw (default), or the name of an EMA")
    options.add_argument("--micro", type=positive(int), metavar="N", help="samples at once")
    where = "auto or cpu; default: the run's machine.device"
    options.add_argument("--device", choices=("auto", "cpu"), help=where)
    accept = "accept other data than the run was trained with; its classes may differ"
    options.add_argument("--accept_changes", action="store_true", help=accept)
    options.add_argument(
        "--task", help="the task to use, if it is not the recorded one (my_task.py:MyTask)"
    )

    # Options of one of them.
    if command == "evaluate":
        options.add_argument("--json", action="store_true", help="print the metrics as JSON")
        options.add_argument(
            "--generate",
            type=_number_or_all,
            metavar="N",
            help="samples to generate for, or all; default: the run's eval.generate",
        )
    else:
        options.add_argument(
            "--to", type=Path, metavar="FILE", help="the file to write: .parquet, .jsonl or .csv"
        )
        options.add_argument("--raw", action="store_true", help="write the model's outputs, too")
    return options


def parsed(command: str, words: Sequence[str]) -> Namespace:
    """Return the options of ``evaluate`` or ``predict``, and ``command``. Raise BadInput."""
    given = parser_of(command).parse_args(words)
    given.command = command

    # Check what is on disk.
    recipe_file(given.run)
    if command == "predict":
        if given.to is None:
            raise BadInput(
                "oneloop predict needs a file to write to: --to FILE.parquet, .jsonl or .csv"
            )
        check_file(given.to)
    return given


def _number_or_all(text: str) -> int | str:
    """Return the number in the text of ``--generate``, or ``all``."""
    if text == "all":
        return text
    try:
        return int(positive(int)(text))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; or write all") from None


def recipe_file(run: Path) -> Path:
    """Return the file with the recipe of a run. Raise BadInput if there is none."""
    file = run / "recipe.yaml"
    if not file.is_file():
        raise BadInput(f"{run} holds no run (no recipe.yaml)")
    return file


def check_file(to: Path) -> None:
    """Raise BadInput for a file that predictions cannot be written to."""
    if to.suffix not in ENDINGS:
        raise BadInput(f"--to {to} must end with one of {', '.join(ENDINGS)}")
    reject_run_folder(to)
    if to.exists():
        raise BadInput(f"--to {to} exists; remove it, or name another file")
    if not to.parent.is_dir():
        raise BadInput(f"--to {to}: the folder {to.parent} does not exist; create it first")
