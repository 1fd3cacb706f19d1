"""The loop. ``accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train digits``"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from oneloop import errors
from oneloop.checkpoint.export import write_final
from oneloop.counters import Best, Counters
from oneloop.data.groups import groups, workers_here
from oneloop.duration import is_time
from oneloop.errors import BadInput, Diverged
from oneloop.evaluate import evaluate_all
from oneloop.folder import Folder, environment
from oneloop.job import Job, build_job
from oneloop.optim.build import set_lr
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.guard import Guard
from oneloop.recipe import read
from oneloop.runtime import Run, leave, start
from oneloop.watch.introduction import introduction
from oneloop.watch.meter import Meter
from oneloop.watch.progress import Display
from oneloop.watch.tracking import Tracking, check_trackers


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Trains ``job`` on the processes of ``run``, into ``folder``; returns the summary.

    Raises:
        Diverged: loss or gradient was not finite.
    """
    recipe, task, split, accelerator = job.recipe, job.task, job.split, run.accelerator
    accelerator.gradient_accumulation_steps = split.accumulate
    model = run.prepare(job.model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = job.optimizer(model)
    guard = Guard(optimizer, device=run.device, scaler=accelerator.scaler)
    workers = workers_here(recipe.machine.workers, device=run.device, local_ranks=run.local_ranks)
    count, best, began = Counters(), Best(), time.perf_counter()
    batches = groups(job.train_set, job.collate, job.order, split, rank=run.rank, seed=recipe.seed,
                     start=count.position, device=run.device, workers=workers)  # fmt: skip
    assess = partial(evaluate_all, task, model, accelerator=accelerator, micro=recipe.eval.micro or split.each,
                     workers=workers, dtype=job.dtype, seed=recipe.seed, interrupted=run.stop_wanted)  # fmt: skip
    validation = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
    meter = Meter(accelerator)
    tracking = Tracking(accelerator, folder.path, project=recipe.name, config=recipe.resolved)
    reason, stopped = "done", False
    results: dict[str, float] = {}

    with Display(job.steps, start=count.step, shown=run.main) as display:
        display.lines(introduction(job, run, model, optimizer))
        for group, weight, stopped in run.agreed(batches):
            if weight == 0:
                raise ValueError(f"step {count.step}: the global batch weighs nothing, so its mean loss is undefined")
            for micro, batch in enumerate(group.batches):
                run.reseed(recipe.seed, count.position, run.rank, micro)  # dropout is a function, not a state
                with accelerator.accumulate(model):
                    loss, _ = task.loss(model, batch)
                    # The sum over the global batch, divided once: this undoes DDP's and accelerate's means.
                    accelerator.backward(loss * (run.ranks * split.accumulate / weight))
                meter.add(loss)
            guard.unscale()
            norm = global_norm(parameters)  # every rank must get here
            clip_(parameters, recipe.optimizer.clip, norm)
            lr = job.rate(count.step, reductions=count.reductions)
            set_lr(optimizer, lr)
            taken = guard.step(norm)  # a non-finite gradient changes nothing
            optimizer.zero_grad(set_to_none=True)
            count.trained(split.size, weight) if taken else count.passed_over(split.size)
            meter.step(weight=weight, samples=split.size, norm=norm)

            # Rare work from here on.
            evaluating = taken and not stopped and is_time(count.step, job.eval_every, job.steps)
            if evaluating or stopped or not taken or is_time(count.step, job.log_every, job.steps):
                figures = {"train/lr": lr, **meter.read()}  # host sync
                if guard.bad():
                    raise Diverged(f"step {count.step - guard.skipped()}: the gradient is not finite (norm"
                                   f" {figures['train/grad_norm']}, mean loss since the last log"
                                   f" {figures['train/loss']}); the weights are those from before it")  # fmt: skip
                tracking.log({**count.figures(job.unit), "time": time.perf_counter() - began, **figures})
                display.figures(count.step, figures)
            if evaluating and validation:
                found = assess(validation)
                if stopped := found is None:  # every rank was told so
                    break
                results |= found
                tracking.log({**count.figures(job.unit), **found, "weights": "raw"})
                display.results(count.step, found)
                better = best.update(found[recipe.eval.best], count.step, higher_is_better=job.upward)
                count.evaluated(better, patience=job.rate.patience)
                if recipe.stop.patience and best.since >= recipe.stop.patience:
                    reason = f"early stop: {recipe.eval.best} was best at step {best.step}"
                    break
                meter.restart()
            if stopped or count.step >= job.steps:
                break

        if not stopped and "test" in job.eval_sets:
            found = assess({"test": job.eval_sets["test"]})
            if not (stopped := found is None):
                results |= found
                tracking.log({**count.figures(job.unit), **found, "weights": "raw"})
                display.results(count.step, found)

    tracking.close()
    write_final(folder.path / "final", model, task)  # every rank must get here
    return {
        "exit_reason": f"stopped by {run.signal or 'a signal to another rank'}" if stopped else reason,
        "exit_code": errors.STOPPED if stopped else errors.DONE,
        **count.figures(job.unit),
        "seconds": time.perf_counter() - began,
        "train/loss": figures["train/loss"],
        **results,
        "best": {"metric": recipe.eval.best, "value": best.value, "step": best.step},
    }


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Reads the recipe, trains it, writes summary.json, and ends the process with oneloop's exit code."""
    is_main = int(os.environ.get("RANK", "0")) == 0
    try:
        recipe = read(sys.argv[1:] if argv is None else argv)
        check_trackers(recipe.track)
        folder = Folder(recipe.folder)
        run = start(sync_each_batch=recipe.machine.sync_each_batch, deterministic=recipe.machine.deterministic,
                    track=recipe.track, folder=recipe.folder)  # fmt: skip
        with run.setting_up():
            finished = folder.inspect(recipe.resolved) if is_main else None
        if finished := run.from_main(finished):
            run.say(finished)
            leave(errors.DONE, main=is_main)
        with run.setting_up():
            job = build_job(recipe, ranks=run.ranks, sharded=run.sharded)
        with run.setting_up():
            if is_main:
                folder.open()
                folder.write("recipe.yaml", recipe.yaml())
                folder.write_json("environment.json", environment(device=str(run.device), processes=run.ranks))
    except BadInput as error:
        if is_main:
            print(f"oneloop: {error}", file=sys.stderr)
        leave(errors.BAD_INPUT, main=is_main)

    run.listen()
    try:
        summary = train(job, run, folder)
    except Diverged as error:
        summary = {"exit_reason": f"diverged: {error}", "exit_code": errors.DIVERGED}
    except BaseException as error:
        traceback.print_exc()
        summary = {"exit_reason": f"error: {type(error).__name__}: {error}", "exit_code": errors.ERROR}
    if is_main:
        folder.write_json("summary.json", summary)
        folder.close()
        print(f"{summary['exit_reason']}; results in {folder.path}", flush=True)
    run.end(summary["exit_code"])


if __name__ == "__main__":
    main()
