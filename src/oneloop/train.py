"""The loop. ``accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train digits``"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports: --help and bad input need none of them
    from oneloop.run import early

    early.begin()

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from oneloop.basics.errors import Diverged
from oneloop.checkpoint.run_state import RunState
from oneloop.checkpoint.store import Keep
from oneloop.data.groups import Group
from oneloop.machine.garbage import scheduled_garbage
from oneloop.machine.replicas import check_replicas
from oneloop.machine.switches import release_cache
from oneloop.measure.noise_scale import NoiseScale
from oneloop.measure.sums import Sums
from oneloop.optim.build import set_lr
from oneloop.optim.clip import clear_gradients, clip_, global_norm
from oneloop.optim.guard import Guard, Step, contagious
from oneloop.optim.policy import BadSteps, Fate, Verdict
from oneloop.run import entry
from oneloop.run.book import Book
from oneloop.run.counters import Best, Counters, Results
from oneloop.run.export import write_final
from oneloop.run.folder import Folder
from oneloop.run.identity import Identity, identity
from oneloop.run.job import Job
from oneloop.run.processes import Run
from oneloop.run.rehearsal import rehearse
from oneloop.run.start_lines import start_lines
from oneloop.run.summary import summary
from oneloop.run.summation import summation
from oneloop.show.examples import Examples


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Trains ``job`` on the processes of ``run``, into ``folder``; returns the summary.

    Raises:
        BadInput: the folder's checkpoints are damaged, or of another model.
        Diverged: a loss or gradient was not finite, or far out of line, and the policy is to stop.
        ReplicasDiffer: two processes no longer hold the same weights.
        ValueError: a global batch weighs nothing.
        OSError: too many saves in a row have failed, or the last one before a stop.
    """
    # The model on its processes (one, DDP or FSDP2), and what is built on its parameters. Nothing is written yet.
    recipe, task, split, rhythm = job.recipe, job.task, job.split, job.rhythm
    accelerator, say = run.accelerator, run.display.say
    accelerator.gradient_accumulation_steps = split.accumulate
    model = run.prepare(job.model, blocks=job.built.blocks)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with run.setting_up():
        optimizer = job.optimizer(model)
        emas = job.emas(model, optimizer)
        seen = rehearse(job, run, model)  # a few samples go through task and model
        known = identity(job, run, optimizer) if run.main else {}
    reduction, sensor, total, fingerprint = summation(job, run, model, optimizer, emas, seen)
    guard = Guard(optimizer, device=run.device, scaler=accelerator.scaler, policy=job.policy, total=total)
    run.display.lines(start_lines(job, run, model, optimizer, emas, seen))

    # What is saved, and where a run goes on. All else is a function of it, or begins anew (a row of bad steps).
    count, best, results, noise = Counters(), Best(), Results(), NoiseScale()
    meter = job.meter(run, parameters, flops=seen.flops, figures=seen.figures)
    same = Identity(run.from_main(known), accept_changes=recipe.run.accept_changes, say=say)
    parts: dict[str, Any] = {"counters": count, "best": best, "meter": meter, "results": results, "noise": noise}
    parts |= {"guard": guard, "identity": same, **job.task_parts(count)}
    parts |= {ema.name: ema for ema in emas} | ({"scaler": accelerator.scaler} if accelerator.scaler else {})
    state = RunState(model, optimizer, averages=emas, parts=parts, own=["tracking"], check=same.check)
    checkpoints = job.checkpoints(folder.path, run)
    job.hold(folder, run, state)
    with run.setting_up():
        saved = state.resume(checkpoints, recipe.run.resume, say=say)
    job.begin(folder, run)
    has_checkpoint = "tracking" in saved  # of its own: another folder's is loaded without
    count.begin()  # of the seconds

    # What is written down and shown.
    resumed = saved.get("tracking")
    tracking = job.tracking(folder.path, run, resumed=resumed, step=count.step, graph=seen.graph)
    state.parts["tracking"] = tracking
    run.closing.callback(tracking.close)
    book = Book(count, results, tracking, run.display, unit=job.unit)
    if saved:
        book.event("resume")
    run.display.begin(lambda: count.step, total=job.steps)
    profiling, clock, advice = job.profiling(folder.path, run, book), meter.clock, job.advice(run)
    bad = BadSteps(job.policy, recipe.guard.patience)
    validation = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}

    def evaluated(sets: dict[str, Any], of: int | None = None) -> bool:
        """Evaluates the weights and each average of them; False where a stop came first. Every rank must get here."""
        examples = Examples(fixed=recipe.eval.samples, worst=recipe.eval.samples) if sets.keys() & validation else None
        figures = job.evaluate(model, sets, run, averages=emas, examples=examples)
        if figures is None:
            return False
        book.evaluated(figures, examples, of=of)
        if recipe.eval.micro not in (None, split.each):
            release_cache()  # memory cached for shapes that training does not have
        clock.mark("evaluate")
        return True

    def validate() -> bool:
        """Evaluates on the validation sets and judges the result; False where a stop came first."""
        count.evaluation_due = True
        if not evaluated(validation):
            return False
        count.evaluation_due = False
        better = best.update(results[recipe.eval.best], count.step, higher_is_better=job.upward)
        count.evaluated(better, patience=job.rate.patience)
        return True

    def log(lr: float, group: Group) -> None:
        """Turns what the device has summed since the last log into figures (host sync). Every rank must get here."""
        figures = {"train/lr": lr, **meter.read(), "train/epoch": count.samples / len(job.train_set)}
        if job.noise_scale:
            noise.add(*sensor.read(group.total, split.size), norm=figures["train/grad_norm"])
            figures |= noise.figures()
        book.log(figures, advice(clock.overall), **fingerprint())

    def save() -> None:
        """Begins a checkpoint; training waits for a copy to host memory. Every rank must get here."""
        book.event("save")
        keep = Keep(recipe.save.keep, job.keep_every, best.step if recipe.save.best else None)
        state.save(checkpoints, count.step, about={"metric": recipe.eval.best, **best.state_dict()}, keep=keep)
        bad.saved()  # ends a row of rewinds
        clock.mark("save")

    def over() -> bool:
        return count.step >= job.steps or 0 < recipe.stop.patience <= best.since

    def handle_bad(step: Step) -> Fate:
        """A step that changed nothing: leaves it out, goes back to the last checkpoint, or ends the run (all ranks)."""
        if step.verdict is Verdict.RESCALED:  # of fp16: the next step has a smaller loss scale
            return Fate.SKIPPED
        action, why = bad.answer(step.verdict)
        number, after = count.step + 1, count.position  # which has passed its samples already
        ids = job.order[after - split.size : after][1].tolist()
        book.write(book.line(step=number, event=action, why=why, ids=ids))
        say(f"step {number}: {why}: {action}; the samples are in metrics.jsonl")
        checkpoints.finish()  # the last good one is sealed first
        if action == "stop":
            raise Diverged(f"step {number}: {why}; the weights are those from before it")
        if action == "skip":
            return Fate.SKIPPED
        if not state.resume(checkpoints, "auto", say=say):
            raise Diverged(f"step {number}: {why}; there is no checkpoint to go back to")
        count.position = after  # the samples since are passed over
        clear_gradients(parameters)
        run.begin_afresh()  # what was loaded ahead is loaded again, from there
        if count.evaluation_due:
            validate()
        return Fate.REWOUND

    def settle() -> Fate | None:
        """What became of the open step (None: none is open). No wait, where the next backward is queued behind it."""
        run.confirm()  # FSDP2 added up the same on all ranks; collective
        if (step := guard.settle()) is None:
            return None
        if step.verdict is not Verdict.TAKEN:
            return handle_bad(step)
        count.trained(split.size, step.weight)
        meter.step(loss=step.loss, figures=step.figures, norm=step.norm, weight=step.weight, samples=split.size)
        for ema in emas:
            ema.update(split.size)
        bad.taken()
        return Fate.TAKEN

    if job.policy.rewinds and not has_checkpoint:
        save()  # so that there is something to go back to
    stopped = count.evaluation_due and not validate()
    steps = () if stopped or over() else run.steps(lambda: job.groups(run, start=count.position), checkpoints)
    clock.restart()
    with profiling, scheduled_garbage("collect" in rhythm) as collect:
        for group in clock.over("data", steps):  # its total weight and its stop are those of all ranks
            # This step's number, if the one before it, which may be open, was taken. (An open step is never due.)
            number = count.step + guard.open + 1
            profiling.step(number)
            clock.mark("other")
            if group.total == 0:
                settle()
                raise ValueError(f"step {count.step + 1}: the global batch weighs nothing: its mean loss is undefined")

            # Accumulate gradients: of the sum over the global batch, divided once by its weight.
            sums = Sums(seen.figures, apart=job.exact)
            scale = reduction.factor / group.total  # undoes accelerate's mean
            with sensor.measuring(job.noise_scale and rhythm.is_due("log", number)):
                for micro, batch in enumerate(clock.over("transfer", group.batches)):
                    job.reseed(run, count.position, micro)  # what is random in the model is a function of where it is
                    with accelerator.accumulate(model), reduction:  # .grad is the sum over micro-batches and ranks
                        loss, outputs = task.loss(model, batch)
                        accelerator.backward(contagious(loss, scale))  # a NaN loss makes every rank's norm NaN
                    sums.add(loss, outputs, group.weights[micro])
                    sensor.micro_batch(group.weights[micro])
                    clock.mark("compute")

            # Settle the step before: count it and move the averages, or handle a bad one. These gradients stay good
            # after a skip, which changed no weight, and not after a rewind.
            if settle() is Fate.REWOUND:
                continue

            # Update weights. The device leaves them alone where the gradients are bad.
            guard.unscale()
            norm = global_norm(parameters, exact=job.exact)  # every rank must get here
            clip_(parameters, recipe.optimizer.clip, norm)
            lr = set_lr(optimizer, job.rate(count.step, reductions=count.reductions))
            meter.before_update(rhythm.is_due("log", count.step + 1))
            guard.step(norm, loss=sums.loss, weight=group.total, figures=sums.figures)
            clear_gradients(parameters)
            count.position += split.size

            # Where something is due (at the last step all is), settle this step now (host sync); else leave it open.
            due, stopped = rhythm.due(count.step + 1), group.stop
            fate = settle() if due or stopped else None
            clock.step("update")
            if fate is Fate.REWOUND or (fate is not Fate.TAKEN and not stopped):
                continue

            # Rare work: no step is open in here.
            due = due if fate is Fate.TAKEN else []
            if "log" in due:
                log(lr, group)
            if "check" in due:
                check_replicas(model, optimizer, step=count.step)
            if "collect" in due:
                collect()
            clock.mark("other")
            if "eval" in due and validation:
                stopped = not validate() or stopped
            if "save" in due or stopped or over() or (recipe.save.best and best.step == count.step):
                save()
            if stopped or over():
                break

    # The end. The best weights are put in place, where they are wanted.
    trouble = checkpoints.finish()
    final = job.final(state, checkpoints, count.step, best, stopped=stopped)
    if not stopped and (sets := job.last_sets(final)):
        stopped = not evaluated(sets, of=final["step"])
    if trouble and stopped:  # the run is not done, and cannot go on where it was
        raise OSError("told to stop, but the last checkpoint could not be written")
    checkpoints.close()
    write_final(folder.path / "final", model, task, emas, about=final)  # every rank must get here
    time = advice.sentence(clock.overall())
    return summary(job, run, count, best, results, noise, final=final, time=time, stopped=stopped)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Trains the recipe that the command line names, and ends the process with oneloop's exit code."""
    entry.main(train, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
