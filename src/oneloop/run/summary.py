"""The end of a run on rank 0: summary.json, the report, the last upload, and the printed result."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.files import dumps, printable, vouched
from oneloop.basics.houses import missing, tool
from oneloop.basics.untrusted import delete
from oneloop.launch.processes import Run
from oneloop.run.folder import Folder
from oneloop.show.terminal import metric


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

    # Write the summary before each upload, which may take long, and with its result.
    _write(folder, summary)
    summary = folder.uploaded(summary, final=summary["exit_code"] == exit_codes.DONE)
    _write(folder, summary)

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
    _write(folder, summary)
    summary = folder.uploaded(summary, final=False)
    _write(folder, summary)
    folder.close()

    # Print the result.
    run.display.lines(advice)
    run.display.lines(_remarks(summary))
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


def _write(folder: Folder, summary: dict[str, Any]) -> None:
    try:
        folder.write_json("summary.json", vouched(summary))
        delete(folder.path / "STOP", inside=folder.path)
    except OSError as error:  # a full disk: the exit code still reports the result
        print(f"the end of the run cannot be written: {error}", file=sys.stderr)


def _remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines at the end: samples and time, the best evaluation, and final/."""
    if summary.get("samples") and summary.get("seconds"):
        rate = summary["samples"] / summary["seconds"]
        seconds = f"{summary['seconds']:,.1f} s"
        yield f"{summary['samples']:,} samples in {seconds}, {rate:,.0f} samples/s on average"

    best = summary.get("best") or {}
    if best.get("value") is not None:
        yield f"best {best['metric']}: {metric(best['value'])} at step {best['step']:,}"
    final = summary.get("final") or {}
    if final and not summary.get("exit_code"):
        about = f"final/ holds the {final['weights']} weights, of step {final['step']:,}"

        # Was the best evaluation well before the end?
        if final["weights"] == "last" and 0 < (best.get("step") or 0) < 0.9 * final["step"]:
            about += "; --save.final best keeps those of the best evaluation"
        yield about
