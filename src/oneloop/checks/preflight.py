"""Preflight check: run a few real samples through task and model before anything is written.

It reports errors early, measures the FLOPs of a sample, and finds random draws and unused
parameters. It leaves no trace.
"""

from torch import nn

from oneloop.checkpoint.optimizer_trial import try_shards
from oneloop.checkpoint.weights import bare
from oneloop.checks.dry_run import dry_run
from oneloop.checks.metrics import check_metrics
from oneloop.checks.questions import (
    check_doubling,
    check_losses,
    check_sets,
    check_units,
    run_twice,
)
from oneloop.checks.rows import check_rows
from oneloop.checks.sums import check_sums
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight, logged_names, unused_parameters
from oneloop.launch.processes import Run
from oneloop.machine.mixed_precision import reject_half_parameters


def preflight(job: Job, run: Run, model: nn.Module) -> Preflight:
    """Run the task on the first samples of the run, the same on all ranks.

    Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.

    Returns:
        What the run needs to know about task and model.

    Raises:
        BadInput: the task is wrong.
    """
    model = bare(model)
    if run.sharded:
        try_shards(job.make_optimizer, next(model.parameters()), job.rate.scheduled)
    if run.accelerator.scaler is not None:
        reject_half_parameters(model)

    # Each question raises BadInput if its answer prevents the run.
    with dry_run(job, run, model) as dry:
        found = dry.found
        check_sets(dry)

        # Evaluations.
        if dry.contract.whole:
            check_rows(dry)
        with evaluating(dry.model):
            check_doubling(dry)
            check_metrics(dry)

        # Training.
        (first, last), units = run_twice(dry)
        check_units(dry, units)
        check_losses(dry, first, last)
        found.unused = unused_parameters(job, run, model, last)
        found.metrics = logged_names(job.task, dry.outputs)
        found.not_summed = check_sums(dry, first)
    found.notes += job.tried.notes
    return found
