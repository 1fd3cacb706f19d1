"""Preflight check: run a few real samples through task and model before anything is written.

It reports errors early, measures the FLOPs of a sample, and finds random draws and unused
parameters. Afterwards it restores what this has changed (:mod:`oneloop.job.restore`).
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.basics.houses import missing, tool
from oneloop.basics.snapshot import Snapshot
from oneloop.basics.tensors import reshard
from oneloop.checkpoint.weights import bare
from oneloop.data.sample_reader import SampleReader
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.embeddings import check_embeddings
from oneloop.job.restore import all_restored, contents_of, has_drawn, random_states
from oneloop.job.sample_contents import BY_COLLATE, IN_PLACE
from oneloop.job.sample_sums import FLOAT32, HALF, BatchSums, SampleSums
from oneloop.job.trial_passes import (
    EVALUATED,
    TRAINED,
    Others,
    Pass,
    Samples,
    TrialSamples,
    Wrapped,
    check_sets,
    load_samples,
    make_batch,
    one_pass,
)
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.fsdp2_units import changed, content, other_units
from oneloop.machine.layout_checks import Checks
from oneloop.machine.mixed_precision import reject_half_parameters
from oneloop.measure.meter import OWN_METRICS
from oneloop.task_protocol.protocol_checks import Contract, theirs
from oneloop.task_protocol.whole_batch import columns_of, parts_of

OWN_STATE = "the model, the loss or collate keeps its own generator or counter"
_SEEDS = 4  # with which FSDP2 must run the same units


@dataclass(frozen=True)
class Preflight:
    """Result of the preflight check."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether the loss of a batch is the sum of its samples' losses
    draws: bool = False  # whether collate, model or loss draw random numbers in training
    collate_draws: bool = False
    others: Others = field(default_factory=Others)
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    moved: str = ""  # first parameter, else buffer, that a forward in training mode changes
    stateful: str = ""  # why the same samples and seeds do not give the same loss each time
    not_summed: str = ""
    """a parameter whose gradient of a batch is not the sum of those of its samples"""
    graph: Any = None  # the model graph for TensorBoard, on rank 0
    notes: list[str] = field(default_factory=list)  # remarks on evaluations


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
    contract = Contract(job.task)
    if run.accelerator.scaler is not None:
        reject_half_parameters(model)
    if run.ranks > 1 and not run.sharded:
        model = Wrapped(model)

    # Load the first samples, where the run reads its data.
    workers = run.workers(job.recipe.machine.workers)
    trial = TrialSamples.first(job, None if workers else run.device)

    # Compiled modules run eagerly: the samples here have other shapes than those of the run.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    others = {"task": job.task, **{f"data set {name}": part for name, part in job.sets.items()}}
    with SampleReader(trial, workers=workers) as reader:
        try:
            restoring = all_restored(model, run.device, others)
            with restoring as before, _task_state_restored(contract), eager:
                samples, _ = load_samples(reader, TRAINED, 0)
                notes = check_sets(job, reader)
                graph = _check_eval(contract, job, run, model, samples, notes, before)
                again, wrong = load_samples(reader, TRAINED, 1)
                seen = _check_training(contract, job, run, model, samples, again, wrong)
                return replace(seen, graph=graph, notes=notes)
        except BadInput as error:
            if run.sharded and isinstance(error.__cause__, RuntimeError):
                raise BadInput(
                    f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model"
                ) from error
            raise


def _check_eval(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    notes: list[str],
    attributes: Snapshot,
) -> Any:
    """Check in eval mode: one sample, the same sample twice, and evaluation samples.

    Add remarks to ``notes``. ``attributes``: before. Return the model graph for TensorBoard.
    """
    first = samples[0]
    tolerance = tolerance_of(job, run, model)

    if contract.whole:
        check_embeddings(contract, job, run, model, samples, tolerance)

    with evaluating(model):
        one, weight = make_batch(contract, run, [first])
        two, twice = make_batch(contract, run, [first, first])
        if (contract.additive or contract.whole) and not contract.draws:
            contract.check_doubling("weight", weight, twice, 1e-6)

        # Compute the loss of the sample, and of the sample twice.
        held = contents_of(model)
        before = random_states(run.device)
        inner = model.module if isinstance(model, Wrapped) else model
        drawing: Any = nullcontext()
        if run.main and "tensorboard" in job.recipe.track:
            graph = tool("graph")
            if graph is None:
                notes.append(f"TensorBoard gets no graph of the model: {missing('graph')}")
            else:
                drawing = graph.Drawing(inner, one)
        with drawing as drawn:
            once = float(contract.loss(model, one)[0])
        reshard(model)  # FSDP2 drops what a forward has changed
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or has_drawn(before, run.device)

        # The second must be twice the first, unless evaluations change something.
        state = ""
        for name, found in contents_of(model).items():
            if found != held.get(name) and not state:
                state = f"a forward in evaluation changes the {name}"
        exact = contract.additive and not contract.draws and not state
        if exact and not contract.is_double(once, both, tolerance):
            reshard(model)
            again = float(contract.loss(model, one)[0])
            if _near(once, again, tolerance):
                contract.check_doubling("loss", once, both, tolerance)
            names = [name for name in attributes.changed() if not name.endswith(".training")]
            known = ", ".join(names[:3]) or "none that can be compared"
            state = (
                "the same sample has another loss in the next evaluation, because the model or the "
                f"loss keeps a generator or other state (attributes that have changed: {known})"
            )
        if state and job.exact:
            raise BadInput(
                "batch.grain requires that evaluations are the same on every process and change "
                f"nothing, but {state}; change it outside of the forward, or remove batch.grain"
            )
        if state:
            notes.append(f"{state}, so another parallel layout trains or evaluates another model")

        # Check the metrics on the first evaluation set.
        for name in [*job.eval_sets][:1]:
            evaluated, _ = load_samples(first.reader, f"{EVALUATED}[{name!r}]", 0)
            notes += _check_metrics(contract, job, run, model, evaluated)
    return drawn.graph if drawn is not None else None


def _check_metrics(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
) -> list[str]:
    """Check metrics on a few samples of an evaluation set, whose batches may have other keys.

    Return lines about values that are neither logged nor drawn.
    """
    evaluation = Contract(job.task)
    batch, _ = make_batch(evaluation, run, samples)
    outputs = evaluation.loss(model, batch)[1]

    # With a loss over the whole batch, metrics get nothing but columns and parts.
    if contract.whole:
        columns = columns_of(job.task, batch)
        outputs = parts_of(contract, model, batch, len(samples))
        batch = columns
    return evaluation.check_metrics(batch, outputs, run.device)


def _check_training(
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
    elif not _near(first.loss, last.loss, 1e-3 * tolerance):
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
    if run.device.type != "cpu" and _near(first.loss, last.loss, 1e-5):
        return "a kernel of the device is not deterministic (see machine.deterministic)"
    return OWN_STATE


def _near(a: float, b: float, tolerance: float, size: float | None = None) -> bool:
    """Whether a and b are equal up to ``tolerance``, relative to ``size`` (default: a).

    True if one is not finite.
    """
    if not math.isfinite(a + b):
        return True
    return abs(a - b) <= tolerance * (abs(a) if size is None else size)


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
            f"the gradient of {last.sparse[0]} is sparse, which is not supported; set sparse=False"
        )

    # FSDP2 needs no gradient of each parameter, and machine.find_unused_parameters has DDP search.
    waits = run.ranks > 1 and not run.sharded and not job.recipe.machine.find_unused_parameters
    if last.unused and waits:
        names = ", ".join(last.unused[:3])
        if len(last.unused) > 3:
            names += f" and {len(last.unused) - 3} more"
        raise BadInput(
            f"the loss does not use {names}, so DDP would wait for their gradients; freeze them "
            "(requires_grad_(False) in model()), or, if other samples or random numbers use them, "
            "set --machine.find_unused_parameters true"
        )


def metric_names(outputs: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the real 0-dim outputs, which are logged as metrics, without ``loss``."""
    numbers = {n: value for n, value in outputs.items() if torch.is_tensor(value) and n != "loss"}
    return tuple(n for n, value in numbers.items() if not value.ndim and not value.is_complex())


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


def tolerance_of(job: Job, run: Run, model: nn.Module) -> float:
    """Return the relative tolerance for rounding of sums."""
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    if narrow or run.accelerator.mixed_precision != "no" or job.recipe.machine.matmul != "highest":
        return 3e-2
    return 1e-9 if job.dtype is torch.float64 else 1e-4


@contextmanager
def _task_state_restored(contract: Contract) -> Iterator[None]:
    """Restore the state of a task that has state_dict()."""
    if not hasattr(contract.task, "state_dict"):
        yield
        return
    before = contract.state()
    yield
    theirs(contract.task, "load_state_dict", lambda: contract.task.load_state_dict(before))
    if contract.state() != before:
        raise contract.wrong(
            "load_state_dict",
            "did not restore what state_dict() returned",
            "restore the whole state",
        )
