"""Run a recipe from the command line: processes, folder, training, summary, exit code."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, Diverged, StoppedEarly, Unavailable
from oneloop.job.build import Job
from oneloop.launch.before_imports import is_main, read_once, reject
from oneloop.launch.processes import Run, start
from oneloop.launch.signals import leave, leave_at_once
from oneloop.recipe.schema import Recipe
from oneloop.run.failure import exits_are_errors, failed, report_error, words_of
from oneloop.run.folder import Folder
from oneloop.run.preparation import prepared
from oneloop.run.summary import end_of
from oneloop.show.terminal import Display
from oneloop.show.tracking import check_trackers
from oneloop.supervise.crash_report import stopped_early

# the summary, and the error that ended the run, if any
Ended = tuple[dict[str, Any], BaseException | None]
# the training loop: :func:`oneloop.train.train`
Train = Callable[[Job, Run, Folder], dict[str, Any]]


def main(train: Train, argv: Sequence[str] | None = None) -> NoReturn:
    """Read the recipe, train it, write summary.json, and exit with oneloop's exit code.

    Args:
        train: the training loop.
        argv: the command line: recipe and keys; None: that of this process.
    """
    if argv is None:
        argv = sys.argv[1:]
    try:
        recipe = read_once(tuple(argv))
        run = start_run(recipe, command=["oneloop.train", *argv])
        run.listen()
        summary, _ = conduct(train, recipe, run, cli=True)
    except (BadInput, Unavailable) as error:
        reject(error)
    except StoppedEarly:
        if is_main():
            print(f"oneloop: {stopped_early(run.stopping.by)}", file=sys.stderr)
        leave_at_once(exit_codes.STOPPED)
    except BaseException as error:  # before the run existed
        report_error(error, words_of(error))
        leave(exit_codes.ERROR, main=is_main())
    run.end(summary["exit_code"])


def start_run(recipe: Recipe, *, command: Sequence[str]) -> Run:
    """Start the processes of a recipe's run, as the launcher configured them.

    Args:
        recipe: its groups machine, batch and watch apply.
        command: module, recipe and keys, for environment.json.

    Raises:
        BadInput: a tracker, the precision or the strategy is not supported.
    """
    check_trackers(recipe.track)
    machine = recipe.machine
    run = start(
        device=machine.device,
        sync_each_batch=machine.sync_each_batch,
        find_unused_parameters=machine.find_unused_parameters,
        deterministic=machine.deterministic,
        exact=recipe.batch.grain is not None,
        track=recipe.track,
        folder=recipe.folder,
    )
    run.command = command
    run.display = Display(shown=run.main, output=recipe.watch.output)
    return run


def conduct(train: Train, recipe: Recipe, run: Run, *, cli: bool = False) -> Ended:
    """Train a recipe on the processes of a run.

    Args:
        train: the training loop.
        recipe: what to train.
        run: this process.
        cli: whether the command line runs it: print tracebacks.

    Returns:
        The summary (of a finished run, the earlier one) and the exception that ended the run, or
        None.

    Raises:
        BadInput: before anything is written. Later it ends the run as other errors do.
        Unavailable: the same, because a mirror cannot be read now.
        StoppedEarly: a stop was requested before anything was written.
    """
    say = run.display.say
    folder: Folder
    if recipe.mirror:
        from oneloop.run.mirrored_folder import MirroredFolder

        folder = MirroredFolder(recipe.folder, recipe.mirror, say=say)
    else:
        folder = Folder(recipe.folder, say=say)
    job: Job | None = None
    fault: BaseException | None = None
    try:
        with run.display, run.closing, exits_are_errors():
            job = prepared(recipe, run, folder, cli=cli)
            if job is None:
                # The run is finished; its folder may be only in the mirror.
                there = None if folder.path.exists() else recipe.mirror
                found = run.from_main(folder.finished)
                return {**found, "folder": str(there or folder.path)}, None
            summary = train(job, run, folder)
    except (BadInput, Unavailable, StoppedEarly) as error:
        # The run may find a fault later: in a batch, in a generated text, in a mirror at a rewind.
        if job is not None and run.begun:
            fault = error
            summary = failed(error, job, run, folder, cli=cli)
        else:
            # Nothing was written. If a stop was requested, the error may follow from it.
            folder.abandon()
            if run.stopping.early is None:
                raise StoppedEarly from error.__cause__
            raise error from error.__cause__
    except Diverged as error:
        fault = error
        summary = {"exit_reason": f"diverged: {error}", "exit_code": exit_codes.DIVERGED}
    except BaseException as error:
        if run.stopping.early is None:  # a library has turned StoppedEarly into its own error
            folder.abandon()
            raise StoppedEarly from error
        # From Python, the caller gets a second interrupt.
        if job is None or (not cli and not isinstance(error, Exception)):
            folder.release()
            raise
        fault = error
        summary = failed(error, job, run, folder, cli=cli)

    # Write the summary on rank 0. An incomplete mirror turns a run that is done into an error.
    if run.main:
        code = summary["exit_code"]
        summary = end_of(run, folder, summary)
        if summary["exit_code"] != code:
            fault = OSError(summary["exit_reason"])
    return {**summary, "folder": str(folder.path)}, fault
