"""Run a recipe from the command line: processes, folder, training, summary, exit code."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, Diverged, StoppedEarly, Unavailable
from oneloop.basics.files import dumps, printable, vouched
from oneloop.basics.houses import missing, tool
from oneloop.basics.launcher import rank, ranks
from oneloop.checkpoint.background_save import SaveError
from oneloop.checkpoint.store import Store, step_of
from oneloop.data.data_workers import end_workers
from oneloop.data.seeded_samples import UnfitSample
from oneloop.job.build import Job, build_job
from oneloop.job.find_micro_batch import explained, find_micro
from oneloop.launch.agreement import where
from oneloop.launch.before_imports import is_main, read_once, reject
from oneloop.launch.processes import Run, start
from oneloop.launch.signals import leave, leave_at_once
from oneloop.machine.micro_batch import is_out_of_memory
from oneloop.machine.torch_settings import float32_products
from oneloop.measure.profiling import memory_snapshot
from oneloop.recipe.schema import Recipe
from oneloop.run.folder import Folder
from oneloop.run.mirrored_folder import MirroredFolder
from oneloop.run.same_on_ranks import reject_other_jobs
from oneloop.run.source_code import another_file, source_changed
from oneloop.show.terminal import Display, metric
from oneloop.show.tracking import check_trackers
from oneloop.supervise.crash_report import stopped_early
from oneloop.supervise.pipe import CHANNEL
from oneloop.supervise.ranks import ADDRESS

# the summary, and the error that ended the run, if any
Ended = tuple[dict[str, Any], BaseException | None]
# the training loop: :func:`oneloop.train.train`
Train = Callable[[Job, Run, Folder], dict[str, Any]]
_WATCHED = 10.0  # seconds that the supervisor has to end a process that reported an error


def main(train: Train, argv: Sequence[str]) -> NoReturn:
    """Read the recipe, train it, write summary.json, and exit with oneloop's exit code.

    Args:
        train: the training loop.
        argv: the command line: recipe and keys.
    """
    try:
        recipe = read_once(tuple(argv))
        run = start_run(recipe, command=["oneloop.train", *argv])
        run.stopping.listen()
        CHANNEL.send(listens=True)
        CHANNEL.send(watched_at=run.from_main(os.environ.get(ADDRESS)))
        summary, _ = conduct(train, recipe, run, cli=True)
    except (BadInput, Unavailable) as error:
        reject(error)
    except StoppedEarly:
        if is_main():
            print(f"oneloop: {stopped_early(run.stopping.by)}", file=sys.stderr)
        leave_at_once(exit_codes.STOPPED)
    except BaseException as error:  # before the run existed
        _report_error(error, _words(error))
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
    run.display = Display(shown=run.main, quiet=recipe.watch.quiet, as_json=recipe.watch.json)
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
        BadInput: before anything is written.
        Unavailable: the same, because a mirror cannot be read now.
        StoppedEarly: a stop was requested before anything was written.
    """
    say = run.display.say
    folder: Folder
    if recipe.mirror:
        folder = MirroredFolder(recipe.folder, recipe.mirror, say=say)
    else:
        folder = Folder(recipe.folder, say=say)
    job: Job | None = None
    fault: BaseException | None = None
    try:
        with run.display, run.closing, _exits_are_errors():
            job = _prepared(recipe, run, folder, cli=cli)
            if job is None:
                # The run is finished; its folder may be only in the mirror.
                there = None if folder.path.exists() else recipe.mirror
                found = run.from_main(folder.finished)
                return {**found, "folder": str(there or folder.path)}, None
            summary = train(job, run, folder)
    except (BadInput, Unavailable, StoppedEarly) as error:
        # A mirror may also fail later, at a rewind.
        if isinstance(error, Unavailable) and job is not None and run.stopping.early is False:
            fault = error
            summary = _failed(error, job, run, folder, cli=cli)
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
        summary = _failed(error, job, run, folder, cli=cli)

    # Write the summary on rank 0. An incomplete mirror turns a run that is done into an error.
    if run.main:
        code = summary["exit_code"]
        summary = _end(run, folder, summary, as_json=recipe.watch.json)
        if summary["exit_code"] != code:
            fault = OSError(summary["exit_reason"])
    return {**summary, "folder": str(folder.path)}, fault


def _failed(
    error: BaseException, job: Job, run: Run, folder: Folder, *, cli: bool
) -> dict[str, Any]:
    """Return the summary of a run that an error ended.

    If memory ran out, add advice and write a memory snapshot.
    """
    end_workers(error)
    reason = _words(error)
    if is_out_of_memory(error):
        # Write a snapshot if rank 0 has begun the run.
        if run.device.type == "cuda" and folder.path.is_dir():
            snapshot = memory_snapshot(folder.path / "profile" / f"out-of-memory-{run.rank}.pickle")
            print(
                f"oneloop: {snapshot} shows which tensors use the memory (pytorch.org/memory_viz)",
                file=sys.stderr,
            )
        reason = explained(job, run, error)
    if isinstance(error, exit_codes.Inexact) and error.equal_at is not None:
        reason += _last_right(folder, error.equal_at)
    if cli:
        _report_error(error, reason)
    return {"exit_reason": f"error: {reason}", "exit_code": exit_codes.ERROR}


def _last_right(folder: Folder, step: int) -> str:
    """Return which checkpoint is from before a step that was found to be right (0: none was)."""
    if not step:
        return "; no earlier check has found the run to be right: start it again"
    sealed = Store(folder.path / "checkpoints").sealed()
    before = [path for path in sealed if step_of(path) < step]
    if before:
        return f"; step {step} was still right, and {before[-1]} is the newest checkpoint before it"
    return f"; step {step} was still right, but no checkpoint is older"


def _words(error: BaseException) -> str:
    """Return type and message of an error.

    Of a data worker's error, this is the last line of its traceback.
    """
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception as why:
        text = f"(its message cannot be printed: {type(why).__name__})"

    # torch wraps an error of a data worker, with its traceback as text.
    if text.startswith("Caught ") and "\nOriginal Traceback" in text:
        kind, _, text = text.strip().splitlines()[-1].partition(": ")
        return f"{kind.rpartition('.')[2]}: {text}"

    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}"


def _report_error(error: BaseException, reason: str) -> None:
    """Print the traceback.

    With several ranks, report it to the supervisor, which prints the first one and ends all ranks.
    """
    # Print only the message if it is enough: oneloop itself found what is wrong.
    cause = error.__cause__
    ours = isinstance(error, UnfitSample) and cause is not None and not where(cause)
    if ours or isinstance(error, exit_codes.Inexact | SaveError):
        error = error.with_traceback(None)
        error.__cause__ = None
        error.__suppress_context__ = True

    # The supervisor prints the first error of all ranks, and ends this process while it waits.
    if CHANNEL.watched and ranks() > 1:
        CHANNEL.fault(error, f"rank {rank()}: {reason}")
        time.sleep(_WATCHED)
    else:
        traceback.print_exception(error)


@contextmanager
def _exits_are_errors() -> Iterator[None]:
    """Turn ``sys.exit`` in the user's code into RuntimeError.

    Its code would be taken for oneloop's.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called{where(error)}") from error


def _end(run: Run, folder: Folder, summary: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Write and print the summary; return it, with an error if the mirror is incomplete."""
    if not folder.begun:
        folder.abandon()
        return summary

    # Write nothing to a folder that was moved, or to another one in its place.
    moved = folder.moved()
    if moved:
        folder.close()
        if moved not in summary["exit_reason"]:
            print(f"oneloop: {moved}", file=sys.stderr)
        return {**summary, "exit_reason": f"error: {moved}", "exit_code": exit_codes.ERROR}

    # Write the summary before the upload, which may take long, and once more with its result.
    _write(folder, summary)
    uploaded = folder.uploaded(summary, final=summary["exit_code"] == exit_codes.DONE)
    if uploaded != summary:
        _write(folder, uploaded)
    summary = uploaded

    # Write the report. An error of the report does not fail the run.
    reporting = tool("report page")
    try:
        if reporting is None:
            print(f"report.html is not written: {missing('report page')}", file=sys.stderr)
        else:
            folder.write("report.html", reporting.report([folder.path]))
    except Exception as error:
        print(f"report.html cannot be written ({type(error).__name__}: {error})", file=sys.stderr)

    # Upload the report. If that fails, the summary says so.
    now = folder.uploaded(summary, final=False)
    if now != summary:
        _write(folder, now)
    summary = now
    folder.close()

    # Print the result.
    run.display.summary(summary)
    run.display.lines(_remarks(summary))
    ended = f"{summary['exit_reason']}; results in {folder.path}"
    if "mirrored" in summary:
        ended += f"; newest step in the mirror: {summary['mirrored']}"
    if summary["exit_code"] == exit_codes.STOPPED:
        ended += "; the same command continues the run"
    if as_json:
        print(dumps({**summary, "folder": str(folder.path)}), flush=True)
    else:
        print(printable(ended), flush=True)
    return summary


def _write(folder: Folder, summary: dict[str, Any]) -> None:
    try:
        folder.write_json("summary.json", vouched(summary))
        (folder.path / "STOP").unlink(missing_ok=True)
    except OSError as error:  # a full disk: the exit code still reports the result
        print(f"summary.json cannot be written ({error.strerror})", file=sys.stderr)


def _remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the summary: noise scale, time, goodput, and a better evaluation."""
    for name in ("noise_scale", "time"):
        about = summary.get(name)
        if about and " n/a" not in about:
            yield about

    # Goodput is of interest if the run was started more than once.
    goodput = (summary.get("goodput") or {}).get("about")
    if goodput is not None and " 1 starts" not in goodput:
        yield goodput

    # Report a best evaluation that is well before the end.
    best = summary.get("best") or {}
    final = summary.get("final") or {}
    step = best.get("step") or 0
    if final.get("weights") == "last" and 0 < step < 0.9 * final["step"]:
        yield (
            f"{best['metric']} was best at step {step:,}: {metric(best['value'])}; final/ holds "
            "the last weights; --save.final best keeps those of the best evaluation"
        )


def _prepared(recipe: Recipe, run: Run, folder: Folder, *, cli: bool) -> Job | None:
    """Return the checked job, or None if the run in the folder is finished.

    Raise BadInput on every rank.
    """
    # Look at the folder on rank 0: may this run be there?
    finished: str | None = None
    with run.setting_up():
        if run.main:
            finished = folder.inspect(
                recipe.resolved, resume=recipe.run.resume, accept_changes=recipe.run.accept_changes
            )
            if not recipe.run.accept_changes:
                other = another_file(recipe, folder.path)
                if other:
                    raise BadInput(
                        f"run.dir {folder.path} {other}; choose another run.dir, or "
                        "--run.accept_changes true"
                    )

    # Return if it is finished. From Python, that would be the result of another class if the source
    # of the task has changed.
    finished = run.from_main(finished)
    if finished:
        other = source_changed(recipe, folder.path)
        if other and not cli:
            raise BadInput(f"{finished.partition(':')[0]}, and {other}")
        if other:
            finished = f"{finished}; {other}"
        run.display.say(finished)
        return None

    def build(micro: int | None) -> Job:
        return build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=micro
        )

    # Build the job. A search for the micro-batch size takes long: find other errors before it.
    machine = recipe.machine
    replaced = float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
    if replaced:
        run.display.say(replaced)
    if isinstance(recipe.batch.micro, str):
        with run.setting_up():
            build(1)
    with run.setting_up():
        job = build(find_micro(recipe, run))
    reject_other_jobs(job, run)
    run.stopping.also(file=folder.path / "STOP", after=recipe.stop.seconds)
    return job
