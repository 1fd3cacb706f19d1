"""Write or push the weights of a run: ``oneloop export``."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE, BadInput, Unavailable
from oneloop.basics.files import printable, reject_run_folder
from oneloop.checkpoint.mirror import local_run
from oneloop.checkpoint.named_checkpoint import chosen_of


def export(words: Sequence[str]) -> int:
    """Write the weights of a run as safetensors, with the files that the task adds (config,
    tokenizer).

    Adapters are written in peft's format. --push commits the same files to the Hugging Face hub,
    with the recipe and a model card; a new repository is private unless --public is given.
    """
    print(printable("\n".join(export_run(parser_of("export").parse_args(words)))))
    return DONE


def parser_of(command: str) -> Options:
    """Return the parser of ``oneloop export``."""
    options = Options(command, export.__doc__)
    options.add_argument("run", type=local_run, metavar="RUN")
    options.add_argument("--to", type=Path, metavar="DIR", help="the folder to write to")
    options.add_argument("--push", metavar="ORG/NAME", help="the repository to push to")
    options.add_argument(
        "--checkpoint", help="final, best, newest or a step; default: final if the run has ended"
    )
    weights = "raw (default), the name of an EMA, or power:SIGMA (after training with --ema.power)"
    options.add_argument("--weights", default="raw", help=weights)
    options.add_argument("--merged", action="store_true", help="add the adapters to the base model")
    options.add_argument(
        "--task", help="the task to use, if it is not the recorded one (my_task.py:MyTask)"
    )
    options.add_argument("--public", action="store_true", help="make a new repository public")
    options.add_argument("--license", metavar="ID", help="of the model card")
    return options


def export_run(given: Namespace) -> list[str]:
    """Write or push a run's weights; return lines about it. Raise BadInput.

    ``given``: the options of ``oneloop export``."""
    if given.to is None and given.push is None:
        raise BadInput(
            "export needs a folder to write to (--to DIR), or a repository of the hub (--push "
            "ORG/NAME)"
        )
    if given.push is None and (given.public or given.license):
        raise BadInput(
            "--public and --license are of a repository of the hub: give --push ORG/NAME too"
        )
    if given.to is not None:
        reject_run_folder(given.to)
    checkpoint = chosen_of(given.run, given.checkpoint, weights=given.weights)

    # The slow imports follow the checks.
    from oneloop.job.task import make_task
    from oneloop.tools.after_training.trained_model import recipe_of
    from oneloop.tools.export.convert import export_checkpoint
    from oneloop.tools.export.push import check_push, push, write_card

    # Write the weights and the model card, also for a push.
    with TemporaryDirectory(prefix="oneloop-") as scratch:
        folder = given.to or Path(scratch)
        try:
            if given.push is not None:
                check_push(given.push)
            recipe = recipe_of(given.run, command="export", task=given.task)
            export_checkpoint(
                checkpoint,
                folder,
                make_task(recipe),
                weights=given.weights,
                merge=given.merged,
                base_dtype=recipe.machine.base_dtype,
            )
            with suppress(ValueError):  # no card if the metrics of the run cannot be read
                write_card(given.run, folder, folder.name, licence=given.license)
        except (BadInput, Unavailable):
            raise
        except (ValueError, OSError) as error:
            raise BadInput(str(error)) from error

        lines = []
        if given.to:
            lines.append(f"{checkpoint.name} of {given.run} is in {given.to}")
        if given.push is not None:
            licence = given.license
            lines.append(push(given.run, folder, given.push, licence=licence, public=given.public))
        return lines
