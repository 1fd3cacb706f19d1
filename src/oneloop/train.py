"""The loop. ``accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train digits``"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports: a launcher may be killed while they run
    from oneloop.checkpoint.orphans import die_with_launcher

    die_with_launcher()

import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from oneloop import errors
from oneloop.checkpoint.checkpoints import Checkpoints, resume
from oneloop.checkpoint.export import write_final
from oneloop.checkpoint.store import Keep
from oneloop.counters import Best, Counters, Results
from oneloop.data.groups import groups, workers_here
from oneloop.duration import is_time
from oneloop.errors import BadInput, Diverged
from oneloop.evaluate import evaluate_all
from oneloop.folder import Folder, environment
from oneloop.introduction import introduction
from oneloop.job import Job, build_job
from oneloop.optim.build import set_lr
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.guard import Guard
from oneloop.parse import read
from oneloop.runtime import Run, leave, start
from oneloop.watch.meter import Meter
from oneloop.watch.progress import Display
from oneloop.watch.tracking import Tracking, check_trackers


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Trains ``job`` on the processes of ``run``, into ``folder``; returns the summary.

    Raises:
        BadInput: the folder's checkpoints are damaged, or of another model.
        Diverged: loss or gradient was not finite.
    """
    recipe, task, split, accelerator = job.recipe, job.task, job.split, run.accelerator
    accelerator.gradient_accumulation_steps = split.accumulate
    model = run.prepare(job.model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = job.optimizer(model)
    guard = Guard(optimizer, device=run.device, scaler=accelerator.scaler)
    workers = workers_here(recipe.machine.workers, device=run.device, local_ranks=run.local_ranks)
    display = Display(job.steps, shown=run.main)
    display.lines(introduction(job, run, model, optimizer))

    # What is saved beside the tensors: everything else is a function of it.
    count, best, meter, results = Counters(), Best(), Meter(accelerator), Results()
    parts: dict[str, Any] = {"counters": count, "best": best, "meter": meter, "results": results}
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    checkpoints = Checkpoints(folder.path / "checkpoints", accelerator, sync=recipe.save.sync,
                              max_failures=recipe.save.max_failures, say=display.say)  # fmt: skip
    with run.setting_up():
        saved = resume(checkpoints, recipe.run.resume, model, optimizer, parts, say=display.say)
    tracking = Tracking(accelerator, folder.path, project=recipe.name, config=recipe.resolved,
                        resumed=saved.get("tracking"), step=count.step)  # fmt: skip
    began = time.perf_counter() - count.seconds
    display.begin(count.step)

    assess = partial(evaluate_all, task, model, accelerator=accelerator, micro=recipe.eval.micro or split.each,
                     workers=workers, dtype=job.dtype, seed=recipe.seed, interrupted=run.stop_wanted)  # fmt: skip
    validation = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}

    def evaluated(sets: dict[str, Any]) -> bool:
        """Evaluates and logs; False where a stop came first. Every rank must get here."""
        found = assess(sets)
        if found is not None:
            results.update(found)
            tracking.log({**count.figures(job.unit), **found, "weights": "raw"})
            display.results(count.step, found)
            meter.restart()
        return found is not None

    def validated() -> bool:
        """Evaluates on the validation sets and judges the result; False where a stop came first."""
        count.evaluation_due = True
        if not evaluated(validation):
            return False
        count.evaluation_due = False
        better = best.update(results[recipe.eval.best], count.step, higher_is_better=job.upward)
        count.evaluated(better, patience=job.rate.patience)
        return True

    def save() -> None:
        """Begins a checkpoint; training waits for a copy to host memory. Every rank must get here."""
        count.seconds = time.perf_counter() - began
        state = {name: part.state_dict() for name, part in parts.items()} | {"tracking": tracking.state_dict()}
        checkpoints.save(count.step, model, optimizer, state, about={"metric": recipe.eval.best, **best.state_dict()},
                         keep=Keep(recipe.save.keep, job.keep_every, best.step if recipe.save.best else None))  # fmt: skip

    def over() -> bool:
        return count.step >= job.steps or 0 < recipe.stop.patience <= best.since

    batches = groups(job.train_set, job.collate, job.order, split, rank=run.rank, seed=recipe.seed,
                     start=count.position, device=run.device, workers=workers)  # fmt: skip
    stopped = count.evaluation_due and not validated()
    to_do = () if stopped or over() else batches
    with display:
        for group, weight, stopped, trouble in run.agreed(to_do, checkpoints.poll):
            if trouble:
                checkpoints.finish()  # says what, on all ranks; too many in a row end the run
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
            logging, evaluating, saving = (is_time(count.step, every, job.steps) and taken
                                           for every in (job.log_every, job.eval_every, job.save_every))  # fmt: skip
            if not (logging or evaluating or saving or stopped) and taken:
                continue
            if guard.bad():  # host sync
                checkpoints.finish()  # the last good one is sealed before the end
                raise Diverged(f"step {count.step - guard.skipped()}: the gradient is not finite (norm {norm.item()});"
                               " the weights are those from before it")  # fmt: skip
            if logging:
                figures = {"train/lr": lr, **meter.read()}  # host sync
                results["train/loss"] = figures["train/loss"]
                tracking.log({**count.figures(job.unit), "time": time.perf_counter() - began, **figures})
                display.figures(count.step, figures)
            if evaluating and validation:
                stopped = not validated() or stopped
            if saving or stopped or over() or (recipe.save.best and best.step == count.step):
                save()
            if stopped or over():
                break

        if not stopped and "test" in job.eval_sets:
            stopped = not evaluated({"test": job.eval_sets["test"]})

    if checkpoints.finish() and stopped:
        raise OSError("told to stop, but the last checkpoint could not be written")
    checkpoints.close()
    tracking.close()
    write_final(folder.path / "final", model, task)  # every rank must get here
    early = f"early stop: {recipe.eval.best} was best at step {best.step}" if count.step < job.steps else "done"
    return {
        "exit_reason": f"stopped by {run.signal or 'a signal to another rank'}" if stopped else early,
        "exit_code": errors.STOPPED if stopped else errors.DONE,
        **count.figures(job.unit),
        "seconds": time.perf_counter() - began,
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
        run.listen()
        with run.setting_up():
            finished = folder.inspect(recipe.resolved, resume=recipe.run.resume,
                                      accept_changes=recipe.run.accept_changes) if is_main else None  # fmt: skip
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
                (folder.path / "summary.json").unlink(missing_ok=True)
        run.stop_by(file=folder.path / "STOP", after=recipe.stop.seconds)
        summary = train(job, run, folder)
    except BadInput as error:
        if is_main:
            print(f"oneloop: {error}", file=sys.stderr)
        leave(errors.BAD_INPUT, main=is_main)
    except Diverged as error:
        summary = {"exit_reason": f"diverged: {error}", "exit_code": errors.DIVERGED}
    except Exception as error:
        traceback.print_exc()
        summary = {"exit_reason": f"error: {type(error).__name__}: {error}", "exit_code": errors.ERROR}
        if "job" not in locals():  # before there was a run
            leave(errors.ERROR, main=is_main)
    if is_main:
        folder.write_json("summary.json", summary)
        (folder.path / "STOP").unlink(missing_ok=True)
        folder.close()
        print(f"{summary['exit_reason']}; results in {folder.path}", flush=True)
    run.end(summary["exit_code"])


if __name__ == "__main__":
    main()
