"""Check task and model in training mode, on a few samples before a run."""

from functools import partial
from typing import Any

from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.checks.tolerance import near, tolerance_of
from oneloop.data.sample_contents import BY_COLLATE, IN_PLACE
from oneloop.job.build import Job
from oneloop.job.preflight_result import Others, Preflight, metric_names
from oneloop.job.sample_sums import FLOAT32, HALF, BatchSums, SampleSums
from oneloop.job.trial_passes import Pass, one_pass
from oneloop.job.trial_samples import Samples
from oneloop.job.unfit_models import LARGE_TABLE
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.layout_checks import Checks
from oneloop.machine.old_units import changed, content, other_units
from oneloop.measure.meter import OWN_METRICS
from oneloop.task_protocol.protocol_checks import Contract

OWN_STATE = "the model, the loss or collate keeps its own generator or counter"
_SEEDS = 4  # with which FSDP2 must run the same units


def check_training(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    reloaded: Samples,
    wrong: str,
) -> Preflight:
    """Check in training mode: a batch twice with the same seeds, and each sample alone.

    ``wrong``: what is wrong with the data set, from the second load.
    """
    tolerance = tolerance_of(job, run, model)
    moved: list[str] = []
    checks = Checks(
        model,
        parameters=run.ranks > 1 or job.exact,
        report=moved.append,
        state=content,
    )
    run_pass = partial(one_pass, contract, job, run, model, checks)

    # Run the batch twice. A loss over the whole batch needs two samples.
    number = max(job.layout.each, 2 if contract.whole else 1)
    micro_batch = samples[:number]
    try:
        passes = [run_pass(micro_batch), run_pass(reloaded[:number])]
        unit_error = other_units([one.units for one in passes], by="a state of the model")

        # Which FSDP2 units run may depend on random numbers (LayerDrop), or on the sample.
        several = len(set(passes[0].units)) > 1 and not has_batch_statistics(model)
        if several and passes[0].draws and not unit_error:
            drawn = [
                run_pass(micro_batch, backward=False, seed=seed).units for seed in range(_SEEDS)
            ]
            unit_error = other_units(drawn, by="random numbers (LayerDrop)")
        if several and not unit_error:
            unit_error = other_units(
                [run_pass([sample], backward=False).units for sample in samples]
            )
    except Inexact as error:
        raise BadInput(str(error)) from None
    finally:
        checks.units.closing.close()
    first, last = passes

    # The batch again must have the same loss.
    stateful = ""
    if wrong.endswith((IN_PLACE, BY_COLLATE)):
        stateful = wrong
    elif not near(first.loss, last.loss, 1e-3 * tolerance):
        stateful = (
            f"the same samples and seeds give a different loss ({first.loss:.9g} and "
            f"{last.loss:.9g}): {_cause(run, first, last, wrong)}"
        )
    _reject(job, run, last, moved, unit_error, stateful)

    # Loss and gradients of the samples must add up to those of the batch.
    draws = contract.draws or first.draws or last.draws
    not_summed = ""
    if contract.additive and len(samples) > 1:
        limits = HALF if tolerance > 1e-3 else FLOAT32
        known = BatchSums(first.loss, first.gradients, first.draws)
        sums = SampleSums(contract, job, run, model, samples)
        not_summed = sums.check(known, limits, of=len(micro_batch))

    return Preflight(
        flops=last.flops / len(micro_batch),
        additive=contract.additive or contract.whole,
        draws=draws,
        collate_draws=contract.collate_draws,
        others=Others(drawn=any(one.others for one in passes)),
        metrics=_metrics(contract, last.outputs),
        unused=last.unused,
        moved=moved[0] if moved else "",
        stateful=stateful,
        not_summed=not_summed,
    )


def _cause(run: Run, first: Pass, last: Pass, wrong: str) -> str:
    """Return why two passes over the same samples have different losses."""
    if wrong:
        return wrong
    if run.device.type != "cpu" and near(first.loss, last.loss, 1e-5):
        return "a kernel of the device is not deterministic (see machine.deterministic)"
    return OWN_STATE


def _reject(job: Job, run: Run, last: Pass, moved: list[str], units: str, stateful: str) -> None:
    """Raise BadInput for a model whose training would depend on the parallel layout.

    ``last``: a pass over a batch. ``moved``: buffers that a forward changed. ``units``: an FSDP2
    error. ``stateful``: why the same samples and seeds do not give the same loss.
    """
    if units:
        raise BadInput(units)
    if job.exact and moved:
        raise BadInput(
            f"batch.grain requires the same buffers on every process, but {changed(moved[0])}"
        )
    if job.exact and stateful:
        raise BadInput(
            "batch.grain requires that the same samples with the same seeds give the same loss, "
            f"but {stateful}. Use torch's global generator and return copies, or remove batch.grain"
        )
    if stateful.endswith(OWN_STATE) and job.recipe.machine.recompute != "none":
        raise BadInput(
            f"machine.recompute {job.recipe.machine.recompute} computes blocks a second time, but "
            f"{stateful}. Use torch's global generator, or machine.recompute none"
        )
    if last.sparse:
        raise BadInput(
            f"the gradient of {last.sparse[0]} is sparse, which is not supported; set "
            f"sparse=False. {LARGE_TABLE}"
        )

    # FSDP2 needs no gradient of each parameter, and machine.find_unused_parameters has DDP search.
    waits = run.ranks > 1 and not run.sharded and not job.recipe.machine.find_unused_parameters
    if last.unused and waits:
        names = ", ".join(last.unused[:3])
        if len(last.unused) > 3:
            names += f" and {len(last.unused) - 3} more"
        raise BadInput(
            f"the loss does not use {names}, so DDP would wait for their gradients; freeze them "
            "(requires_grad_(False) in model()), or, if other steps, samples or random numbers use "
            "them, set --machine.find_unused_parameters true"
        )


def _metrics(contract: Contract, outputs: dict[str, Any]) -> tuple[str, ...]:
    names = metric_names(outputs)
    for name in names:
        if f"train/{name}" in OWN_METRICS:
            raise contract.wrong(
                "loss",
                f"returned the output {name!r}",
                f"oneloop also logs train/{name}: rename it",
            )
    return names
