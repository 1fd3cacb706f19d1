"""Preflight check: run a few real samples through task and model before anything is written.

It reports errors early, measures the FLOPs of a sample, and finds random draws and unused
parameters. It leaves no trace.
"""

from contextlib import nullcontext
from typing import Any

from torch import nn

from oneloop.basics.houses import missing, tool
from oneloop.checkpoint.optimizer_trial import try_shards
from oneloop.checkpoint.weights import bare
from oneloop.checks.dry_run import DryRun, dry_run
from oneloop.checks.evaluation_trial import check_doubling, check_metrics
from oneloop.checks.rows import check_rows
from oneloop.checks.samples import check_sets
from oneloop.checks.sums import check_sums
from oneloop.checks.training_trial import (
    check_gradients,
    check_losses,
    check_outputs,
    check_units,
    run_twice,
)
from oneloop.data.step_batches import Batch
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.preflight_result import Others, Preflight
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
        contract = dry.contract
        notes = check_sets(job, dry.read)

        # Evaluations.
        if contract.whole:
            check_rows(dry)
        with evaluating(dry.model):
            batch, weight = dry.batch([0])
            drawing = _graph_of(dry, batch, notes)
            notes += check_doubling(dry, batch, weight, drawing)
            notes += check_metrics(dry)

        # Training.
        first, last, moved = run_twice(dry)
        check_units(dry, first, last)
        stateful = check_losses(dry, first, last)
        unused = check_gradients(dry, last)
        metrics = check_outputs(contract, last)
        not_summed = check_sums(dry, first)

    return Preflight(
        flops=last.flops / len(dry.micro_batch),
        additive=contract.additive or contract.whole,
        draws=contract.draws or first.draws or last.draws,
        collate_draws=contract.collate_draws,
        others=Others(drawn=first.others or last.others or job.tried.draws_others),
        metrics=metrics,
        unused=unused,
        moved=moved,
        stateful=stateful,
        not_summed=not_summed,
        graph=getattr(drawing, "graph", None),
        notes=[*notes, *job.tried.notes],
    )


def _graph_of(dry: DryRun, batch: Batch, notes: list[str]) -> Any:
    """Return a context for the forward of a batch; it draws the graph for TensorBoard, if asked."""
    if not (dry.run.main and "tensorboard" in dry.job.recipe.track):
        return nullcontext()
    graph = tool("graph")
    if graph is None:
        notes.append(f"TensorBoard gets no graph of the model: {missing('graph')}")
        return nullcontext()
    return graph.Drawing(dry.root, batch)
