"""The training loop.

accelerate launch --config_file accelerate_configs/ddp.yaml -m oneloop.train digits
"""

if __name__ == "__main__":  # before the slow imports: --help and bad input need none of them
    import sys

    from oneloop.launch import hidden_modules

    hidden_modules.begin(sys.argv[1:])

from typing import Any

from oneloop.checks.preflight import preflight
from oneloop.checks.repeats import Checks
from oneloop.data.step_batches import Group
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.gradients import Gradients
from oneloop.loop.steps import StepBatches
from oneloop.loop.training_state import State
from oneloop.loop.upkeep import Upkeep
from oneloop.measure.meter import Meter
from oneloop.optim.bad_step_guard import Guard, Step, contagious
from oneloop.optim.bad_step_policy import Outcome
from oneloop.optim.clip import clip_
from oneloop.optim.optimizers import set_lr
from oneloop.run import entry
from oneloop.run.folder import Folder


# --8<-- [start:loop]
def accumulate(
    run: Run, gradients: Gradients, group: Group, meter: Meter, *, position: int, measured: bool
) -> None:
    """Accumulate a step's gradients: the loss is the sum over the global batch / its weight.

    Args:
        run: this process, with its accelerator.
        gradients: seeds the random numbers of each micro-batch; sums gradients, losses and metrics.
        group: this rank's micro-batches, their weights, and the total weight of all ranks.
        meter: its clock measures the phases of the step.
        position: index of the step's first sample in the order of all samples.
        measured: whether to measure what only a log line shows.
    """
    accelerator = run.accelerator
    model = gradients.model
    clock = meter.clock

    # Divide the summed loss by the total weight of the global batch. The factor undoes accelerate's
    # mean over the micro-batches; DDP and FSDP2 are set to sum over the ranks
    # (machine/reduction.py).
    scale = gradients.factor / group.total

    with gradients.summing(position, measured=measured):
        # A loss over the whole batch (contrastive) makes a first pass over all micro-batches here.
        loss_of, batches = gradients.passes(clock.over("transfer", group.batches))

        # Accumulate gradients. After the last micro-batch, .grad is the sum over all ranks.
        for batch, weight in zip(batches, group.weights, strict=False):
            with accelerator.accumulate(model), gradients.micro_batch(weight):
                loss, outputs = loss_of(model, batch)
                # loss * scale. A NaN loss on one rank makes the gradient norm NaN on all ranks.
                accelerator.backward(contagious(loss, scale))
            gradients.sums.add(loss, outputs, weight)
            clock.mark("compute")


def update(
    gradients: Gradients,
    guard: Guard,
    *,
    lr: float,
    clip: float,
    weight: float,
    momentum: float | None = None,
) -> None:
    """Update the weights, which the device leaves unchanged if the gradients are bad.

    The step is then pending: whether its gradients were bad is not yet known.

    Args:
        gradients: the gradients of the step, and the sums of its losses and metrics.
        guard: updates the weights, or detects that the step is bad.
        lr: learning rate.
        clip: largest global norm of the gradients (0: no limit).
        weight: total weight of the global batch.
        momentum: momentum, if the schedule changes it.
    """
    # Clip by the norm over all ranks, after fp16's loss scale is divided out.
    guard.unscale()
    norm = gradients.norm()
    clip_(gradients.parameters, clip, norm)

    # Queue the update. With a fused optimizer, the host does not wait to learn of bad gradients.
    set_lr(guard.optimizer, lr, momentum)
    gradients.seed_update()  # of an optimizer that draws random numbers
    sums = gradients.sums
    guard.step(norm, loss=sums.loss, weight=weight, metrics=sums.metrics)
    gradients.clear()


def accept(step: Step, meter: Meter, emas: list[EMA], samples: int) -> None:
    """Record a step of ``samples`` samples that was not bad, and update the EMA weights.

    The weights are those of this step: the next update is not queued yet.
    """
    meter.step(
        loss=step.loss, metrics=step.metrics, norm=step.norm, weight=step.weight, samples=samples
    )
    for ema in emas:
        ema.update(samples)


def train(job: Job, run: Run, folder: Folder) -> dict[str, Any]:
    """Train ``job`` and return the summary (summary.json). Collective: call on every rank.

    Args:
        job: what the recipe describes: task, data, model, optimizer and intervals.
        run: this process, with its rank, device and accelerator.
        folder: the run folder.

    Raises:
        BadInput: the folder's checkpoints are damaged, or belong to another model.
        Diverged: a loss or gradient was not finite or far too large, and the recipe says to stop.
        Inexact: the step would depend on the parallel layout.
        ReplicasDiffer: two processes no longer hold the same weights.
        ValueError: the total weight of a global batch is 0.
        OSError: too many saves in a row have failed, or the last one before a stop.
    """
    clip = job.recipe.optimizer.clip  # largest norm of the gradients
    layout = job.layout  # global batch = ranks x accumulated micro-batches x micro-batch
    intervals = job.intervals
    accelerator = run.accelerator

    # Prepare the model (one process, DDP or FSDP2), its optimizer and its EMA weights.
    accelerator.gradient_accumulation_steps = layout.accumulate
    model = run.prepare(job.model, blocks=job.built.blocks)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with run.setting_up():  # an error of one rank ends all of them
        optimizer = job.make_optimizer(model)
        emas = [EMA(model, settings, optimizer=optimizer) for settings in job.emas]
        trial = preflight(job, run, model)  # runs a few samples through task and model
    gradients = Gradients(job, run, model, parameters, trial)
    guard = Guard(
        optimizer,
        device=run.device,
        scaler=accelerator.scaler,
        sigma=job.recipe.guard.sigma,
        total=gradients.total,
    )

    # Resume from a checkpoint, if there is one. Nothing is written before open().
    state = State(job, run, folder, model, optimizer, emas, guard, trial)
    state.open(trial)
    count = state.count
    meter = state.meter
    clock = meter.clock  # mark(phase): the time since the last mark was spent on this phase
    step_batches = StepBatches(state, gradients.units)
    checks = Checks(job, run, model, trial, seed=gradients.seed_as, units=gradients.units)
    upkeep = Upkeep(state, gradients, checks, step_batches)  # the rare work

    def resolve() -> Outcome | None:
        """Return the outcome of the pending step (see below), or None if no step is pending."""
        step_batches.compare_fsdp2_units()  # all ranks must have run the same modules in one order
        step = guard.resolve()
        if step is None:
            return None
        outcome = upkeep.judge(step)  # of a bad step: skip, rewind, or raise Diverged
        if outcome is Outcome.ACCEPTED:
            count.trained(layout.size, step.weight)
            accept(step, meter, emas, layout.size)
        return outcome

    # Save a first checkpoint, if bad steps rewind to one. No step may be pending at a save.
    if job.recipe.guard.nonfinite == "rewind" and not state.resumed:
        upkeep.save()

    # Make up for an evaluation that a stop prevented. Another stop may prevent it again.
    stopped = count.evaluation_due and not upkeep.validate()
    clock.restart()
    with upkeep.around_steps() as profiler:
        # The pending step. guard.step() queues an update, which the device skips if its gradients
        # are bad. The step is then pending: the host does not yet know whether it was skipped. It
        # queues the next backward first, and then calls resolve():
        #     backward n | update n | backward n+1 | resolve n | update n+1 | backward n+2 | ...
        # So the device always has work queued, and the host waits at most for older work. Only if
        # something is due (a log line, an evaluation, a save, a stop, the end) does it resolve
        # step n right after update n.
        #
        # A group: this rank's micro-batches of a step, whose total weight all ranks agreed on.
        for group in clock.over("data", () if stopped or upkeep.over() else step_batches):
            # its number, if the pending step is accepted
            expected = count.step + (guard.pending is not None) + 1
            profiler.advance(expected)
            if group.total == 0:
                resolve()  # it may raise its own error
                raise ValueError(
                    f"step {count.step + 1}: the total weight of the global batch is 0, so the "
                    "mean loss is undefined; check task.weight()"
                )

            # Before some logged steps, all ranks compute one micro-batch, compare, and restore.
            checks.repeat_if_due(group, count.position)
            clock.mark("other")
            # Accumulate gradients.
            measured = intervals.is_due("log", expected)
            accumulate(run, gradients, group, meter, position=count.position, measured=measured)

            # Resolve the previous step. A rewind has cleared these gradients, too.
            if resolve() is Outcome.REWOUND:
                continue
            number = count.step + 1  # less than expected if the previous step was skipped

            # Update weights.
            meter.before_update(measured=intervals.is_due("log", number))
            lr = job.rate(count.step, reductions=count.reductions)
            momentum = job.rate.momentum(count.step)  # None: the schedule does not change it
            update(gradients, guard, lr=lr, momentum=momentum, clip=clip, weight=group.total)
            count.position += layout.size  # also if this step is skipped

            # Is anything due, such as "log" or "save"? If not, leave this step pending.
            due = intervals.due(number, save=group.save)
            stopped = group.stop  # a stop request on any rank
            outcome = resolve() if due or stopped else None
            clock.lap("update")
            if outcome is Outcome.REWOUND:
                continue  # the next group carries a stop request again
            if outcome is not Outcome.ACCEPTED and not stopped:
                continue  # pending or skipped

            # Do the rare work: log, compare replicas, collect garbage, evaluate.
            if outcome is not Outcome.ACCEPTED:
                due = []  # a skipped step only saves, because of the stop
            completed = upkeep.work(due, lr, group.total)
            stopped = stopped or not completed

            # Save a checkpoint.
            over = upkeep.over()
            if "save" in due or stopped or over or upkeep.is_best():
                upkeep.save()

            # Done?
            if stopped or over:
                break
    # --8<-- [end:loop]

    # Wait for the last checkpoint, write final/, evaluate on the test set, and sum up.
    return upkeep.end(stopped=stopped)


def main(argv: list[str] | None = None) -> None:
    """Train the recipe that the command line names; exit with oneloop's exit code."""
    entry.main(train, argv)


if __name__ == "__main__":
    main()
