"""The loop. ``accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train digits``"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports: a launcher may be killed while they run
    from oneloop.checkpoint.orphans import die_with_launcher

    die_with_launcher()

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from oneloop import entry
from oneloop.checkpoint.checkpoints import Checkpoints, resume
from oneloop.checkpoint.export import write_final
from oneloop.checkpoint.store import Keep
from oneloop.conclusion import conclusion
from oneloop.counters import Best, Counters, Results
from oneloop.data.groups import Group, groups, workers_here
from oneloop.duration import is_time
from oneloop.errors import Diverged
from oneloop.evaluate import evaluate_all
from oneloop.folder import Folder
from oneloop.introduction import introduction
from oneloop.job import Job
from oneloop.memory.garbage import scheduled_garbage
from oneloop.memory.switches import release_cache
from oneloop.optim.build import set_lr
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.guard import Guard
from oneloop.optim.noise_scale import NoiseScale, Sensor
from oneloop.optim.policy import BadSteps, Verdict
from oneloop.replicas import check_replicas
from oneloop.runtime import Run
from oneloop.watch.diagnosis import Advice
from oneloop.watch.examples import Examples
from oneloop.watch.meter import Meter
from oneloop.watch.profiling import Profiling
from oneloop.watch.tracking import Tracking


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Trains ``job`` on the processes of ``run``, into ``folder``; returns the summary.

    Raises:
        BadInput: the folder's checkpoints are damaged, or of another model.
        Diverged: a loss or gradient was not finite, or far out of line, and the policy is to stop.
        ReplicasDiffer: two processes no longer hold the same weights.
    """
    recipe, task, split, accelerator, display = job.recipe, job.task, job.split, run.accelerator, run.display
    accelerator.gradient_accumulation_steps = split.accumulate
    model = run.prepare(job.model, blocks=job.blocks)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = job.optimizer(model)
    guard = Guard(optimizer, device=run.device, scaler=accelerator.scaler, policy=job.policy, total=run.total)
    emas = job.emas(model, optimizer)
    workers = workers_here(recipe.machine.workers, device=run.device, local_ranks=run.local_ranks)
    display.lines(introduction(job, run, model, optimizer, emas))

    # What is saved beside the tensors: everything else is a function of it.
    count, best, results, noise = Counters(), Best(), Results(), NoiseScale()
    meter = Meter(accelerator, parameters, flops=job.flops, peak=run.peak_flops(), tokens=job.unit == "tokens")
    parts: dict[str, Any] = {"counters": count, "best": best, "meter": meter, "results": results, "noise": noise,
                             "guard": guard, **{ema.name: ema for ema in emas},
                             **({"scaler": accelerator.scaler} if accelerator.scaler else {})}  # fmt: skip
    checkpoints = Checkpoints(folder.path / "checkpoints", accelerator, sync=recipe.save.sync,
                              max_failures=recipe.save.max_failures, say=display.say)  # fmt: skip

    def averages() -> dict[str, Tensor]:
        return {name: tensor for ema in emas for name, tensor in ema.tensors().items()}

    def restore(asked: str) -> dict[str, Any]:
        return resume(checkpoints, asked, model, optimizer, parts, extra=averages(), say=display.say)

    with run.setting_up():
        saved = restore(recipe.run.resume)
    tracking = Tracking(accelerator, folder.path, project=recipe.name, config=recipe.resolved,
                        resumed=saved.get("tracking"), step=count.step, graph=job.graph, say=display.say)  # fmt: skip
    run.closing.callback(tracking.close)
    if saved:
        tracking.log({**count.figures(job.unit), "event": "resume"})
    began = time.perf_counter() - count.seconds
    display.begin(lambda: count.step, total=job.steps)

    assess = partial(evaluate_all, task, model, averages=emas, accelerator=accelerator, micro=recipe.eval.micro or split.each,
                     workers=workers, dtype=job.dtype, seed=recipe.seed, interrupted=run.stop_wanted)  # fmt: skip
    validation = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
    bad = BadSteps(job.policy, recipe.guard.patience)
    advice = Advice(after=3, workers=workers, cores=run.cores, eval_every=job.rhythm["eval"],
                    save_every=job.rhythm["save"])  # fmt: skip
    drawn: tuple[float, Tensor, Tensor] | None = None  # weight, norm and loss of a step whose verdict is not known yet

    def evaluated(sets: dict[str, Any], examples: Examples | None = None) -> bool:
        """Evaluates weights and averages, and logs; False where a stop came first. Every rank must get here."""
        found = assess(sets, examples=examples)
        if found is None:
            return False
        if examples is not None:
            tracking.show(count.step, examples)
        for weights, figures in found.items():
            results.take(figures, weights)
            tracking.log({**count.figures(job.unit), **figures, "weights": weights})
            display.results(count.step, figures, weights)
        if recipe.eval.micro not in (None, split.each):
            release_cache()  # it is of shapes that training has no use for
        meter.clock.mark("evaluate")
        return True

    def validated() -> bool:
        """Evaluates on the validation sets and judges the result; False where a stop came first."""
        count.evaluation_due = True
        if not evaluated(validation, Examples(fixed=recipe.eval.samples, worst=recipe.eval.samples)):
            return False
        count.evaluation_due = False
        better = best.update(results[recipe.eval.best], count.step, higher_is_better=job.upward)
        count.evaluated(better, patience=job.rate.patience)
        return True

    def save() -> None:
        """Begins a checkpoint; training waits for a copy to host memory. Every rank must get here."""
        count.seconds = time.perf_counter() - began
        tracking.log({**count.figures(job.unit), "event": "save"})
        state = {name: part.state_dict() for name, part in parts.items()} | {"tracking": tracking.state_dict()}
        checkpoints.save(count.step, model, optimizer, state, extra=averages(),
                         about={"metric": recipe.eval.best, **best.state_dict()},
                         keep=Keep(recipe.save.keep, job.keep_every, best.step if recipe.save.best else None))  # fmt: skip
        bad.saved()
        meter.clock.mark("save")

    def over() -> bool:
        return count.step >= job.steps or 0 < recipe.stop.patience <= best.since

    def settle(*, wait: bool) -> bool:
        """Counts the last step where it was taken, as far as is known; False where it was not, or not known yet."""
        nonlocal drawn
        verdict = guard.verdict(wait=wait) if drawn else None
        if drawn is None or verdict is None:
            return False
        (weight, norm, loss), drawn = drawn, None
        if verdict is not Verdict.TAKEN:
            refuse(verdict)
            return False
        count.trained(split.size, weight)
        meter.step(loss=loss, weight=weight, samples=split.size, norm=norm)
        for ema in emas:
            ema.update(split.size)
        bad.taken()
        return True

    def refuse(verdict: Verdict) -> None:
        """A bad step, which changed nothing: ends the run, leaves it out, or passes over all since the last checkpoint."""
        if verdict is Verdict.RESCALED:
            return
        action, why = bad.answer(verdict)
        ago = guard.bad_steps()  # 1, but where the run ends at the first bad step and is told later
        after, first = count.position, count.position - ago * split.size
        event = {**count.figures(job.unit), "step": count.step + 2 - ago, "event": action, "why": why,
                 "ids": job.order[first : first + split.size][1].tolist()}  # fmt: skip
        checkpoints.finish()  # the last good one is sealed first
        if action == "rewind":
            back = restore("auto")
            if not back:
                raise Diverged(f"step {event['step']}: {why}; there is no checkpoint to go back to")
            tracking.go_back(back["tracking"])
            count.position = after
            run.begin_afresh()
        tracking.log(event)
        display.say(f"step {event['step']}: {why}: {action}; the samples are in metrics.jsonl")
        if action == "stop":
            raise Diverged(f"step {event['step']}: {why}; the weights are those from before it")

    def batches() -> Iterator[Group]:
        return groups(job.train_set, job.collate, job.order, split, rank=run.rank, seed=recipe.seed,
                      start=count.position, device=run.device, workers=workers)  # fmt: skip

    sensor = Sensor(accelerator, model)
    if job.policy.rewinds and "tracking" not in saved:  # none in this folder yet
        save()  # so that there is something to go back to
    stopped = count.evaluation_due and not validated()
    to_do = () if stopped or over() else run.agreed(batches, checkpoints.poll)
    profiling = Profiling(folder.path / "profile", run.device, profile=recipe.watch.profile if run.main else None,
                          memory=recipe.watch.memory if run.main else None, say=display.say,
                          log=lambda figures: tracking.log(count.figures(job.unit) | figures))  # fmt: skip
    meter.clock.restart()
    with profiling, scheduled_garbage("collect" in job.rhythm) as collect:
        for group, weight, stopped, trouble in to_do:
            if trouble:
                checkpoints.finish()  # says what, on all ranks; too many in a row end the run
            if weight == 0:
                raise ValueError(f"step {count.step}: the global batch weighs nothing, so its mean loss is undefined")
            total: Any = 0.0
            # Whether this step may log: its number depends on the one before, where that one's verdict is awaited.
            near = any(is_time(count.step + n, job.rhythm["log"], job.steps) for n in ([1, 2] if drawn else [1]))
            meter.clock.mark("data")
            profiling.step(count.step + 1)
            meter.clock.mark("other")
            with sensor.measuring(job.noise_scale and near):
                for micro, batch in enumerate(group.batches):
                    meter.clock.mark("transfer")
                    run.reseed(recipe.seed, count.position, run.rank, micro)  # dropout is a function, not a state
                    with accelerator.accumulate(model):
                        loss, _ = task.loss(model, batch)
                        value = loss.detach()
                        # The sum over the global batch, divided once: this undoes DDP's and accelerate's means. A loss
                        # that is not finite makes its gradient so, and with it every rank's.
                        accelerator.backward(loss * (run.ranks * split.accumulate / weight + 0 * value))
                    total = total + value
                    sensor.micro_batch(group.weights[micro])
                    meter.clock.mark("compute")
            guard.unscale()
            norm = global_norm(parameters)  # every rank must get here
            clip_(parameters, recipe.optimizer.clip, norm)
            settle(wait=True)  # the step before, where it was left open
            step = count.step + 1
            if near:
                meter.before_update()
            if not run.afresh:
                lr = job.rate(count.step, reductions=count.reductions)
                set_lr(optimizer, lr)
                guard.step(norm, loss=total, weight=weight)  # a bad step changes nothing
                drawn = weight, norm, total
                count.position += split.size
            optimizer.zero_grad(set_to_none=True)

            # Rare work from here on.
            due = [name for name, every in job.rhythm.items() if is_time(step, every, job.steps)]
            due = due if settle(wait=bool(due) or stopped) else []  # host sync where something is due
            meter.clock.mark("update")
            meter.clock.step()
            if run.afresh or not (due or stopped):
                continue
            if "log" in due:
                figures = {"train/lr": lr, **meter.read()}  # host sync
                figures["train/epoch"] = count.samples / len(job.train_set)
                if job.noise_scale:
                    noise.add(*sensor.read(weight, split.size), norm=figures["train/grad_norm"])
                    figures |= noise.figures()
                results["train/loss"] = figures["train/loss"]
                tracking.log({**count.figures(job.unit), "time": time.perf_counter() - began, **figures})
                display.figures(count.step, figures, advice(meter.clock.overall))
            if "check" in due:
                check_replicas(model, optimizer, step=count.step)
            if "collect" in due:
                collect()
            if "eval" in due and validation:
                stopped = not validated() or stopped
            meter.clock.mark("other")
            if "save" in due or stopped or over() or (due and recipe.save.best and best.step == count.step):
                save()
            if stopped or over():
                break

        if not stopped and "test" in job.eval_sets:
            stopped = not evaluated({"test": job.eval_sets["test"]})

    if checkpoints.finish() and stopped:
        raise OSError("told to stop, but the last checkpoint could not be written")
    checkpoints.close()
    write_final(folder.path / "final", model, task, emas)  # every rank must get here
    return conclusion(job, run, count, best, results, noise, time=advice.sentence(meter.clock.overall()), stopped=stopped,
                      seconds=time.perf_counter() - began)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Trains the recipe that the command line names, and ends the process with oneloop's exit code."""
    entry.main(train, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
