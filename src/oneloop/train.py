"""The loop. ``accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train
digits``"""

if __name__ == "__main__":  # before the slow imports: --help and bad input need none of them
    from oneloop.launch import before_imports

    before_imports.begin()

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from oneloop.data.step_batches import Group
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight import preflight
from oneloop.launch.processes import Run
from oneloop.machine.torch_settings import scheduled_garbage
from oneloop.measure.meter import Meter, Sums
from oneloop.optim.bad_step_guard import Guard, Step, contagious
from oneloop.optim.bad_step_policy import Fault, Outcome
from oneloop.optim.clip import clear_gradients, clip_
from oneloop.optim.optimizers import set_lr
from oneloop.run import entry
from oneloop.run.folder import Folder
from oneloop.run.gradients import Gradients
from oneloop.run.start_lines import start_lines
from oneloop.run.steps import NO_WEIGHT, Steps
from oneloop.run.training_state import State
from oneloop.run.upkeep import Upkeep


# --8<-- [start:loop]
def accumulate(
    job: Job,
    run: Run,
    gradients: Gradients,
    group: Group,
    meter: Meter,
    *,
    position: int,
    measured: bool,
) -> Sums:
    """Accumulate the gradients of a step's summed loss, divided by the total weight of the global
    batch (all ranks). Return this rank's sums. ``position``: of the first sample; ``measured``: a
    log line follows."""
    accelerator, model, clock, sums = (
        run.accelerator,
        gradients.model,
        meter.clock,
        gradients.sums(),
    )
    # the factor undoes accelerate's mean over the micro-batches
    scale = gradients.factor / group.total
    with gradients.step(position, measured=measured):
        # a whole-batch loss has two
        loss_of, batches = gradients.passes(clock.over("transfer", group.batches))
        for batch, weight in zip(batches, group.weights, strict=False):
            # .grad: sum over all ranks
            with accelerator.accumulate(model), gradients.micro_batch(weight):
                loss, outputs = loss_of(model, batch)
                # a NaN loss makes the norm NaN on all ranks
                accelerator.backward(contagious(loss, scale))
            sums.add(loss, outputs, weight)
            clock.mark("compute")
    return sums


def update(
    gradients: Gradients, guard: Guard, sums: Sums, *, lr: float, clip: float, weight: float
) -> None:
    """Update the weights. The device leaves them unchanged if the gradients are bad. The step is
    then pending."""
    guard.unscale()
    norm = gradients.norm()
    clip_(gradients.parameters, clip, norm)
    set_lr(guard.optimizer, lr)
    guard.step(norm, loss=sums.loss, weight=weight, metrics=sums.metrics)
    clear_gradients(gradients.parameters)


def accept(step: Step, meter: Meter, emas: Sequence[EMA], samples: int) -> None:
    """Record a step that was not bad, and average the weights."""
    meter.step(
        loss=step.loss, metrics=step.metrics, norm=step.norm, weight=step.weight, samples=samples
    )
    for ema in emas:
        ema.update(samples)


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Train ``job`` on the processes of ``run``, into ``folder``; return the summary. Collective:
    call on every rank.

    Raises:
        BadInput: the folder's checkpoints are damaged, or belong to another model.
        Diverged: a loss or gradient was not finite or far too large, and the recipe says to stop.
        Inexact: the step would depend on the parallel layout.
        ReplicasDiffer: two processes no longer hold the same weights.
        ValueError: the total weight of a global batch is 0.
        OSError: too many saves in a row have failed, or the last one before a stop.
    """
    # The model on its processes (one, DDP or FSDP2), and its optimizer and EMA weights.
    recipe, layout, intervals, accelerator = job.recipe, job.layout, job.intervals, run.accelerator
    accelerator.gradient_accumulation_steps = layout.accumulate
    model = run.prepare(job.model, blocks=job.built.blocks)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with run.setting_up():  # an error of one rank ends all of them
        optimizer = job.make_optimizer(model)
        emas = [EMA(model, optimizer=optimizer, **ema) for ema in job.emas]
        seen = preflight(job, run, model)  # preflight check: a few samples through task and model
    gradients = Gradients(job, run, model, parameters, seen)
    guard = Guard(
        optimizer,
        device=run.device,
        scaler=accelerator.scaler,
        policy=job.policy,
        total=gradients.total,
    )

    # The state that a checkpoint holds. Until begin(), nothing is written; after it, a resumed run
    # is where it was.
    state = State(job, run, folder, model, optimizer, emas, guard, seen)
    run.display.lines(start_lines(job, run, model, optimizer, emas, seen))
    run_log = state.begin(job, run, folder, graph=seen.graph)
    count, meter, clock, checkpoints = (
        state.count,
        state.meter,
        state.meter.clock,
        state.checkpoints,
    )
    steps = Steps(job, run, count, checkpoints, gradients.checks)
    upkeep = Upkeep(job, run, state, run_log, gradients, steps, emas)

    def resolve() -> Outcome | None:
        """Return the outcome of the pending step, or None if no step is pending. See "The pending
        step" below."""
        steps.confirm()  # FSDP2: all ranks ran the same units
        if (step := guard.resolve()) is None:
            return None
        if step.fault is not Fault.NONE:
            return upkeep.bad_step(step)  # skip, rewind, or raise Diverged
        count.trained(layout.size, step.weight)
        accept(step, meter, emas, layout.size)
        upkeep.bad.accepted()
        return Outcome.ACCEPTED

    def save() -> None:
        """Start a checkpoint; training waits only for a copy to host memory. No step may be
        pending."""
        run_log.event("save")
        state.save(checkpoints, count.step, **upkeep.kept())
        upkeep.bad.saved()
        clock.mark("save")

    if job.policy.rewinds and not run_log.resumed:
        save()  # so that there is a checkpoint to rewind to
    stopped = count.evaluation_due and not upkeep.validate()
    clock.restart()
    with (
        upkeep.profiling(folder.path / "profile") as profiling,
        scheduled_garbage("collect" in intervals),
    ):
        # The pending step. guard.step() queues an update, which the device skips if its gradients
        # are bad. The step is then pending: the host does not yet know which. It queues the next
        # backward first, and then calls resolve():
        # backward n | update n | backward n+1 | resolve n | update n+1 | backward n+2 | resolve n+1
        # | ... So the device always has work queued, and the host waits at most for work that is
        # older. Only if something is due (a log line, an evaluation, a save, a stop, the end) does
        # it resolve step n right after update n.
        for group in clock.over("data", () if stopped or upkeep.over() else steps):
            number = count.step + guard.pending + 1  # of this step, if the pending one is accepted
            profiling.step(number)
            clock.mark("other")
            if group.total == 0:
                resolve()
                raise ValueError(f"step {count.step + 1}: {NO_WEIGHT}")

            measured = intervals.is_due("log", number)
            sums = accumulate(
                job, run, gradients, group, meter, position=count.position, measured=measured
            )
            # the previous step: these gradients belong to weights that are gone
            if resolve() is Outcome.REWOUND:
                continue

            meter.before_update(intervals.is_due("log", count.step + 1))
            lr = job.rate(count.step, reductions=count.reductions)
            update(gradients, guard, sums, lr=lr, clip=recipe.optimizer.clip, weight=group.total)
            count.position += layout.size

            # stop: a request on any rank
            due, stopped = intervals.due(count.step + 1, save=group.save), group.stop
            outcome = resolve() if due or stopped else None
            clock.step("update")
            if outcome is Outcome.REWOUND or (outcome is not Outcome.ACCEPTED and not stopped):
                # skipped or still pending: nothing to do; after a rewind, a stop is heard at the
                # next step
                continue

            # Rare work: log, compare replicas, collect garbage, evaluate; save. A skipped step
            # saves only at a stop.
            due = due if outcome is Outcome.ACCEPTED else []
            stopped = not upkeep.work(due, lr, group.total) or stopped
            if "save" in due or stopped or upkeep.over() or upkeep.is_best():
                save()
            if stopped or upkeep.over():
                break
    # --8<-- [end:loop]

    # The end: the last checkpoint, the best weights if the recipe asks for them, final/, the test
    # set.
    failed = checkpoints.finish()
    final = upkeep.final_weights(stopped=stopped)
    checkpoints.close()
    upkeep.write_final(folder.path / "final", final)
    stopped = stopped or not upkeep.last_evaluation(final)
    if failed and stopped:  # the run is not done, and cannot be resumed from where it was
        raise OSError("the run was stopped, but the last checkpoint could not be written")
    return upkeep.summary(final, stopped=stopped)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train the recipe that the command line names, and end the process with oneloop's exit
    code."""
    entry.main(train, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
