"""From a command line to a run and its exit code: recipe, processes, folder, summary."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from oneloop.basics import errors
from oneloop.basics.errors import BadInput, Diverged
from oneloop.basics.plain_json import dumps
from oneloop.machine.micro_batch import is_out_of_memory
from oneloop.machine.switches import float32_products
from oneloop.measure.profiling import memory_snapshot
from oneloop.recipe.schema import Recipe
from oneloop.run.build import build_job
from oneloop.run.early import is_main, read_once, refuse
from oneloop.run.ending import leave
from oneloop.run.environment import environment
from oneloop.run.folder import Folder
from oneloop.run.job import Job
from oneloop.run.processes import Run, start
from oneloop.run.trial import explained, find_micro
from oneloop.show.display import Display
from oneloop.show.report.page import report
from oneloop.show.tracking import check_trackers


def main(train: Callable[[Job, Run, Folder], dict[str, Any]], argv: Sequence[str]) -> NoReturn:
    """Reads the recipe, trains it, writes summary.json, and ends the process with oneloop's exit code."""
    main = is_main()
    job: Job | None = None
    try:
        recipe = read_once(tuple(argv))
        check_trackers(recipe.track)
        folder = Folder(recipe.folder)
        run = start(
            sync_each_batch=recipe.machine.sync_each_batch,
            deterministic=recipe.machine.deterministic,
            track=recipe.track,
            folder=recipe.folder,
        )
        run.stopping.listen()
        run.display = Display(shown=run.main, quiet=recipe.watch.quiet, as_json=recipe.watch.json)
        with run.display, run.closing:
            job = _prepared(recipe, run, folder, argv)
            if job is not None:
                summary = train(job, run, folder)
        if job is None:
            leave(errors.DONE, main=main)
    except BadInput as error:
        refuse(error)
    except Diverged as error:
        summary = {"exit_reason": f"diverged: {error}", "exit_code": errors.DIVERGED}
    except Exception as error:
        traceback.print_exc()
        summary = {"exit_reason": f"error: {type(error).__name__}: {error}", "exit_code": errors.ERROR}
        if job is None:  # before there was a run
            leave(errors.ERROR, main=main)
        if is_out_of_memory(error):
            if run.device.type == "cuda":
                snapshot = memory_snapshot(folder.path / "profile" / f"out-of-memory-{run.rank}.pickle")
                print(f"oneloop: {snapshot} shows what holds the memory (pytorch.org/memory_viz)", file=sys.stderr)
            summary["exit_reason"] = f"error: {explained(job, run)}"
            print(f"oneloop: {summary['exit_reason']}", file=sys.stderr)
    if main:
        folder.write_json("summary.json", summary)
        (folder.path / "STOP").unlink(missing_ok=True)
        try:
            folder.write("report.html", report([folder.path]))
        except Exception as error:  # a page that cannot be drawn is no fault of the run
            print(f"report.html cannot be written ({type(error).__name__}: {error})", file=sys.stderr)
        folder.close()
        run.display.summary(summary)
        run.display.lines(summary[about] for about in ("noise_scale", "time") if about in summary)
        ended = f"{summary['exit_reason']}; results in {folder.path}"
        print(dumps({**summary, "folder": str(folder.path)}) if recipe.watch.json else ended, flush=True)
    run.end(summary["exit_code"])


def _prepared(recipe: Recipe, run: Run, folder: Folder, argv: Sequence[str]) -> Job | None:
    """The job, checked, and its folder with what is known before it starts; None where the folder holds it, finished.

    Raises:
        BadInput: on every rank; nothing was written.
    """
    with run.setting_up():
        finished = (
            folder.inspect(recipe.resolved, resume=recipe.run.resume, accept_changes=recipe.run.accept_changes)
            if run.main
            else None
        )
    if finished := run.from_main(finished):
        run.display.say(finished)
        return None
    float32_products(recipe.machine.matmul, benchmark=recipe.machine.cudnn_benchmark)
    if isinstance(recipe.batch.micro, str):  # what is wrong with the rest is found before the search
        with run.setting_up():
            build_job(recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=1)
    with run.setting_up():
        job = build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=find_micro(recipe, run)
        )
    with run.setting_up():
        if run.main:
            folder.open()
            folder.write("recipe.yaml", recipe.yaml())
            folder.write_json(
                "environment.json",
                environment(command=["oneloop.train", *argv], device=str(run.device), processes=run.ranks),
            )
            (folder.path / "summary.json").unlink(missing_ok=True)
    run.stopping.also(file=folder.path / "STOP", after=recipe.stop.seconds)
    return job
