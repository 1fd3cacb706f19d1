"""The end of a run: its summary, also of an error, the report, and the printed result."""

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.files import dumps, printable
from oneloop.basics.houses import missing, tool
from oneloop.basics.launcher import rank, ranks
from oneloop.basics.memory import is_out_of_memory
from oneloop.checkpoint.background_save import SaveError
from oneloop.data.data_workers import end_workers
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.run.folder import Folder
from oneloop.supervise.pipe import CHANNEL
from oneloop.task_protocol.user_code import where

_WATCHED = 10.0  # seconds that the supervisor has to end a process that reported an error


def failed(
    error: BaseException, job: Job, run: Run, folder: Folder, *, cli: bool
) -> dict[str, Any]:
    """Return the summary of a run that an error ended, with advice if memory ran out."""
    if isinstance(error, exit_codes.Diverged):
        return {"exit_reason": f"diverged: {error}", "exit_code": exit_codes.DIVERGED}
    end_workers(error)
    reason = words_of(error)
    advice = tool("advice on memory") if is_out_of_memory(error) else None
    if advice is not None:
        reason = advice.explained(job, run, folder.path, error)
    if isinstance(error, exit_codes.Inexact) and error.equal_at is not None:
        before = "no step was found to be right: start the run again"
        if error.equal_at:
            before = f"step {error.equal_at} was still right: continue from a checkpoint before it"
        reason += f"; {before}"
    if cli:
        report_error(error, reason)
    return {"exit_reason": f"error: {reason}", "exit_code": exit_codes.ERROR}


def words_of(error: BaseException) -> str:
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


def report_error(error: BaseException, reason: str) -> None:
    """Print the traceback.

    With several ranks, report it to the supervisor, which prints the first one and ends all ranks.
    """
    # Print only the message if it is enough: oneloop itself found what is wrong.
    ours = exit_codes.Inexact | exit_codes.BadInput | exit_codes.Unavailable | SaveError
    if isinstance(error, ours):
        error = type(error)(reason.partition(": ")[2])

    # The supervisor prints the first error of all ranks, and ends this process while it waits.
    if CHANNEL.watched and ranks() > 1:
        CHANNEL.fault(error, f"rank {rank()}: {reason}")
        time.sleep(_WATCHED)
    else:
        traceback.print_exception(error)


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Turn ``sys.exit`` in the user's code into RuntimeError.

    Its code would be taken for oneloop's.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called{where(error)}") from error


def end_of(run: Run, folder: Folder, summary: dict[str, Any]) -> dict[str, Any]:
    """Write and print the summary; return it, with an error if the mirror is incomplete."""
    if not folder.begun:
        folder.abandon()
        return summary

    # Write nothing if the folder was moved: another folder may be in its place.
    moved = folder.moved()
    if moved:
        folder.close()
        if moved not in summary["exit_reason"]:
            print(f"oneloop: {moved}", file=sys.stderr)
        return {**summary, "exit_reason": f"error: {moved}", "exit_code": exit_codes.ERROR}

    summary = folder.record(summary, final=summary["exit_code"] == exit_codes.DONE)

    # Write the report, which derives goodput and advice from metrics.jsonl. An error of the report
    # does not fail the run.
    advice: list[str] = []
    try:
        reporting = tool("the report page")
        if reporting is None:
            print(f"report.html is not written: {missing('the report page')}", file=sys.stderr)
        else:
            page, more, advice = reporting.ended(folder.path)
            folder.write("report.html", page)
            summary = summary | more
    except Exception as error:
        print(f"report.html cannot be written ({type(error).__name__}: {error})", file=sys.stderr)
    summary = folder.record(summary, final=False)
    folder.close()

    # Print the result.
    run.display.lines(advice)
    ended = f"{summary['exit_reason']}; results in {folder.path}"
    if "mirrored" in summary:
        ended += f"; newest step in the mirror: {summary['mirrored']}"
    if summary["exit_code"] == exit_codes.STOPPED:
        ended += "; the same command continues the run"
    if run.display.output == "json":
        print(dumps({**summary, "folder": str(folder.path)}), flush=True)
    else:
        print(printable(ended), flush=True)
    return summary
