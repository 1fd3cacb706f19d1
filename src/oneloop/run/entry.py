"""Run a recipe from the command line: processes, folder, training, summary, exit code."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, Diverged, StoppedEarly
from oneloop.basics.files import dumps, printable, vouched
from oneloop.basics.launcher import rank, ranks
from oneloop.data.seeded_samples import UnfitSample
from oneloop.data.step_batches import end_workers
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
from oneloop.run.compatibility import another_file, source_changed
from oneloop.run.folder import Folder
from oneloop.run.mirrored_folder import MirroredFolder
from oneloop.run.same_on_ranks import reject_other_jobs
from oneloop.show.report.page import report
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
    """Read the recipe, train it, write summary.json, and end the process with oneloop's exit
    code."""
    try:
        recipe = read_once(tuple(argv))
        run = start_run(recipe, command=["oneloop.train", *argv])
        run.stopping.listen()
        CHANNEL.send(listens=True)
        CHANNEL.send(watched_at=run.from_main(os.environ.get(ADDRESS)))
        summary, _ = conduct(train, recipe, run, cli=True)
    except BadInput as error:
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
    """Start the processes of a recipe's run, as the launcher configured them. Raise BadInput."""
    check_trackers(recipe.track)
    machine = recipe.machine
    how: dict[str, Any] = {
        "sync_each_batch": machine.sync_each_batch,
        "exact": recipe.batch.grain is not None,
    }
    how |= {
        "find_unused_parameters": machine.find_unused_parameters,
        "deterministic": machine.deterministic,
    }
    run = start(**how, track=recipe.track, folder=recipe.folder)
    run.command = command
    run.display = Display(shown=run.main, quiet=recipe.watch.quiet, as_json=recipe.watch.json)
    return run


def conduct(train: Train, recipe: Recipe, run: Run, *, cli: bool = False) -> Ended:
    """Train a recipe with the loop ``train`` on the processes of a run; return the summary (of a
    finished run, the earlier one) and the exception that ended the run, if any. ``cli``: the
    command line runs it, so print tracebacks. Raise BadInput before anything is written."""
    job: Job | None = None
    fault: BaseException | None = None
    say, mirror = run.display.say, recipe.mirror
    folder = (
        MirroredFolder(recipe.folder, mirror, say=say) if mirror else Folder(recipe.folder, say=say)
    )
    try:
        with run.display, run.closing, _exits_are_errors():
            job = _prepared(recipe, run, folder, cli=cli)
            if job is None:
                there = recipe.mirror if not folder.path.exists() else None
                return {**run.from_main(folder.finished), "folder": str(there or folder.path)}, None
            summary = train(job, run, folder)
    except (BadInput, StoppedEarly) as error:
        folder.abandon()
        raise (StoppedEarly() if run.stopping.early is None else error) from error.__cause__
    except Diverged as error:
        fault, summary = (
            error,
            {"exit_reason": f"diverged: {error}", "exit_code": exit_codes.DIVERGED},
        )
    except BaseException as error:
        if run.stopping.early is None:  # a library has turned StoppedEarly into its own error
            folder.abandon()
            raise StoppedEarly from error
        # from Python: a second interrupt
        if job is None or (not cli and not isinstance(error, Exception)):
            folder.release()
            raise
        fault, summary = error, _failed(error, job, run, folder, cli=cli)
    if run.main:
        summary, before = _end(run, folder, summary, as_json=recipe.watch.json), summary
        if summary["exit_code"] != before["exit_code"]:
            fault = OSError(summary["exit_reason"])
    return {**summary, "folder": str(folder.path)}, fault


def _failed(
    error: BaseException, job: Job, run: Run, folder: Folder, *, cli: bool
) -> dict[str, Any]:
    """Return the summary of a run that an error ended; if memory ran out, with advice and a memory
    snapshot."""
    end_workers(error)
    reason = _words(error)
    if is_out_of_memory(error):
        if run.device.type == "cuda" and folder.path.is_dir():  # rank 0 has begun the run
            snapshot = memory_snapshot(folder.path / "profile" / f"out-of-memory-{run.rank}.pickle")
            print(
                f"oneloop: {snapshot} shows which tensors use the memory (pytorch.org/memory_viz)",
                file=sys.stderr,
            )
        reason = explained(job, run)
    if cli:
        _report_error(error, reason)
    return {"exit_reason": f"error: {reason}", "exit_code": exit_codes.ERROR}


def _words(error: BaseException) -> str:
    """Return type and message of an error; of a data worker's error, the last line of its
    traceback."""
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception as why:
        text = f"(its message cannot be printed: {type(why).__name__})"
    if text.startswith("Caught ") and "\nOriginal Traceback" in text:
        kind, _, text = text.strip().splitlines()[-1].partition(": ")
        return f"{kind.rpartition('.')[2]}: {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _report_error(error: BaseException, reason: str) -> None:
    """Print the traceback. With several ranks, report it to the supervisor, which prints the first
    one and ends all."""
    ours = (
        isinstance(error, UnfitSample)
        and error.__cause__ is not None
        and not where(error.__cause__)
    )
    if ours or isinstance(error, exit_codes.Inexact):
        error = error.with_traceback(None)  # the message is enough
        error.__cause__, error.__suppress_context__ = None, True
    if CHANNEL.watched and ranks() > 1:
        CHANNEL.fault(error, f"rank {rank()}: {reason}")
        time.sleep(_WATCHED)
    else:
        traceback.print_exception(error)


@contextmanager
def _exits_are_errors() -> Iterator[None]:
    """Turn ``sys.exit`` in the user's code into RuntimeError, since its code would be taken for
    oneloop's."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called{where(error)}") from error


def _end(run: Run, folder: Folder, summary: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Write and print the summary; return it, with an error if the mirror is incomplete."""
    if not folder.begun:
        folder.abandon()
        return summary
    _write(folder, summary)  # before the upload, which may take long
    summary = folder.uploaded(summary, final=summary["exit_code"] == exit_codes.DONE)
    _write(folder, summary)
    try:
        folder.write("report.html", report([folder.path]))
    except Exception as error:  # an error of the report does not fail the run
        print(f"report.html cannot be written ({type(error).__name__}: {error})", file=sys.stderr)
    if (now := folder.uploaded(summary, final=False)) != summary:
        _write(folder, now)
    summary = now
    folder.close()
    run.display.summary(summary)
    run.display.lines(_remarks(summary))
    resume = "; the same command continues the run" * (summary["exit_code"] == exit_codes.STOPPED)
    there = f"; newest step in the mirror: {summary['mirrored']}" if "mirrored" in summary else ""
    ended = printable(f"{summary['exit_reason']}; results in {folder.path}{there}{resume}")
    print(dumps({**summary, "folder": str(folder.path)}) if as_json else ended, flush=True)
    return summary


def _write(folder: Folder, summary: dict[str, Any]) -> None:
    try:
        folder.write_json("summary.json", vouched(summary))
        (folder.path / "STOP").unlink(missing_ok=True)
    except OSError as error:  # a full disk: the exit code still reports the result
        print(f"summary.json cannot be written ({error.strerror})", file=sys.stderr)


def _remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the summary: noise scale, time, and a best evaluation that ``final/``
    does not hold."""
    yield from (
        about
        for name in ("noise_scale", "time")
        if (about := summary.get(name)) and " n/a" not in about
    )
    goodput = summary.get("goodput") or {}
    yield from [goodput["about"]] if " 1 starts" not in goodput.get("about", " 1 starts") else []
    best, final = summary.get("best") or {}, summary.get("final") or {}
    if final.get("weights") == "last" and 0 < (best.get("step") or 0) < 0.9 * final["step"]:
        was = f"{best['metric']} was best at step {best['step']:,}: {metric(best['value'])}"
        yield (
            f"{was}; final/ holds the last weights; --save.final best keeps those of the best "
            "evaluation"
        )


def _prepared(recipe: Recipe, run: Run, folder: Folder, *, cli: bool) -> Job | None:
    """Return the checked job, or None if the run in the folder is finished. Raise BadInput on every
    rank."""
    with run.setting_up():
        finished = (
            folder.inspect(
                recipe.resolved, resume=recipe.run.resume, accept_changes=recipe.run.accept_changes
            )
            if run.main
            else None
        )
        if (
            run.main
            and not recipe.run.accept_changes
            and (other := another_file(recipe, folder.path))
        ):
            raise BadInput(
                f"run.dir {folder.path} {other}; choose another run.dir, or "
                "--run.accept_changes true"
            )
    if finished := run.from_main(finished):
        other = source_changed(recipe, folder.path)
        if other and not cli:  # from Python, it would return the result of another class
            raise BadInput(f"{finished.partition(':')[0]}, and {other}")
        run.display.say(f"{finished}; {other}" if other else finished)
        return None
    float32_products(recipe.machine.matmul, benchmark=recipe.machine.cudnn_benchmark)
    how: dict[str, Any] = {"ranks": run.ranks, "sharded": run.sharded, "device": run.device.type}
    if isinstance(recipe.batch.micro, str):  # find other errors before the search
        with run.setting_up():
            build_job(recipe, micro=1, **how)
    with run.setting_up():
        job = build_job(recipe, micro=find_micro(recipe, run), **how)
    reject_other_jobs(job, run)
    run.stopping.also(file=folder.path / "STOP", after=recipe.stop.seconds)
    return job
