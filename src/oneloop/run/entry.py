"""Run a recipe from the command line: processes, folder, training, summary, exit code."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, StoppedEarly, Unavailable
from oneloop.basics.houses import required
from oneloop.job.build import Job, build_job
from oneloop.launch.before_imports import is_main, read_once, reject
from oneloop.launch.processes import Run, start
from oneloop.launch.signals import leave, leave_at_once
from oneloop.machine.torch_settings import float32_products
from oneloop.recipe.schema import Recipe
from oneloop.run.compatibility import inputs_of, recipe_inputs, reject_other_jobs
from oneloop.run.end import end_of, exits_are_errors, failed, report_error, words_of
from oneloop.run.folder import Finished, Folder
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
    leave(summary["exit_code"], main=run.main)


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
            finished = _finished(recipe, run, folder, cli=cli)
            if finished:
                # The folder may be only in the mirror.
                there = None if folder.path.exists() else recipe.mirror
                return {**finished.summary, "folder": str(there or folder.path)}, None
            job = _prepared(recipe, run)
            file = folder.path / "STOP" if run.main else None
            run.stopping.also(file=file, after=recipe.stop.seconds)
            summary = train(job, run, folder)
    except BaseException as error:
        # If a stop was requested before the run began, the error may follow from it.
        if run.stopping.early is None:
            folder.abandon()
            raise StoppedEarly from error

        # Nothing was written, or (from Python) the caller gets a second interrupt.
        rejected = isinstance(error, BadInput | Unavailable) and not run.begun
        interrupted = not (cli or isinstance(error, Exception))
        if job is None or rejected or interrupted:
            folder.abandon()
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


def _finished(recipe: Recipe, run: Run, folder: Folder, *, cli: bool) -> Finished | None:
    """Return the run in the folder if it is this one, and finished. Collective.

    Args:
        recipe: what to train.
        run: this process.
        folder: the run folder, which may hold an earlier run; nothing is written to it.
        cli: whether the command line runs it.

    Raises:
        BadInput: on every rank: this run may not use the folder.
    """
    # Rank 0 looks at the folder.
    finished: Finished | None = None
    with run.setting_up():
        if run.main:
            finished = folder.inspect(
                recipe_inputs(recipe),
                resume=recipe.run.resume,
                accept_changes=recipe.run.accept_changes,
            )
            # From Python, the result would be that of another class.
            if finished and finished.edited and not cli:
                raise BadInput(finished.message)
    finished = run.from_main(finished)
    if finished:
        run.display.say(finished.message)
    return finished


def _prepared(recipe: Recipe, run: Run) -> Job:
    """Build and check the job of a recipe, after a search for the micro-batch size. Collective.

    Raise BadInput on every rank.
    """
    machine = recipe.machine
    float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
    micro = None
    if isinstance(recipe.batch.micro, str):
        with run.setting_up():
            micro = required("batch.micro auto").find_micro(recipe, run)
    with run.setting_up():
        job = build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=micro
        )
        job = replace(job, inputs=inputs_of(job, run))
    if run.ranks > 1:
        reject_other_jobs(job, run)
    return job
