"""Write or push the weights of a run: ``oneloop export``."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.checkpoint.named_checkpoint import chosen_of


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
    checkpoint = chosen_of(given.run, given.checkpoint, weights=given.weights)

    # The slow imports follow the checks.
    from oneloop.job.build import make_task
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
