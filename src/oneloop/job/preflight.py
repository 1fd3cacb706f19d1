"""Preflight check: run a few real samples through task and model before anything is written.

It reports errors early, measures the FLOPs of a sample, and finds random draws and unused
parameters. Afterwards it restores what this has changed (:mod:`oneloop.job.restore`).
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.checkpoint.weights import bare
from oneloop.data.sample_reader import SampleReader
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.restore import all_restored, has_drawn, random_states
from oneloop.job.trial_passes import (
    EVALUATED,
    TRAINED,
    Others,
    Pass,
    Samples,
    TrialSamples,
    Wrapped,
    load_samples,
    make_batch,
    one_pass,
)
from oneloop.launch.processes import Run
from oneloop.machine.blocks import DROPOUT, has_batch_statistics, has_dropout
from oneloop.machine.layout_checks import Checks, changed, content, other_units
from oneloop.measure.meter import OWN_METRICS
from oneloop.show.graph import Drawing
from oneloop.tasks.protocol_checks import Contract, theirs
from oneloop.tasks.whole_batch import check_loss, check_rows, columns_of, parts_of

SAMPLED = 4  # maximum number of samples; each is loaded twice


@dataclass(frozen=True)
class Preflight:
    """Result of the preflight check."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether the loss of a batch is the sum of its samples' losses
    draws: bool = False  # whether collate, model or loss draw random numbers in training
    others: Others = field(default_factory=Others)
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    moved: str = ""  # first buffer or parameter that a forward in training mode changes
    stateful: bool = False
    """whether the same samples and seeds gave a different loss: some object keeps its own generator
    or counter"""
    linear: bool = True  # whether the gradient of a batch is the sum of the gradients of its halves
    graph: Any = None  # the model graph for TensorBoard, on rank 0


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

    # Load the first samples. A loss over the whole batch needs two.
    least = 2 if contract.whole else 1
    number = min(SAMPLED, max(job.layout.each, least), len(job.train_set))
    epochs, indices = job.order.at(np.arange(number))
    positions = [*zip(epochs.tolist(), indices.tolist(), strict=True)]
    sets: dict[str, Any] = {TRAINED: (job.train_set, positions)}
    for dataset in [*job.eval_sets.values()][:1]:
        places = [(0, index) for index in range(min(SAMPLED, job.layout.each, len(dataset)))]
        sets[EVALUATED] = dataset, places
    workers = run.workers(job.recipe.machine.workers)
    trial = TrialSamples(job, sets, None if workers else run.device)

    # Compiled modules run eagerly: the samples here have other shapes than those of the run.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    others = {"task": job.task, **{f"data set {name}": part for name, part in job.sets.items()}}
    with SampleReader(trial, workers=workers) as reader:
        try:
            with all_restored(model, run.device, others), _task_state_restored(contract), eager:
                samples = load_samples(reader, TRAINED, 0)
                graph = _check_eval(contract, job, run, model, samples)
                again = load_samples(reader, TRAINED, 1)
                return _check_training(contract, job, run, model, samples, again, graph)
        except BadInput as error:
            if run.sharded and isinstance(error.__cause__, RuntimeError):
                raise BadInput(
                    f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model"
                ) from error
            raise


def reject_half_parameters(model: nn.Module) -> None:
    """Raise BadInput if a trained parameter has a 16-bit dtype.

    fp16 loss scaling needs float32 gradients.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(
                f"mixed_precision fp16 requires float32 parameters, but {name} is {kind}; return "
                "a float32 model from model(), or use mixed_precision no"
            )


def _check_eval(contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples) -> Any:
    """Check in eval mode: one sample, the same sample twice, and evaluation samples.

    Return the model graph for TensorBoard.
    """
    first = samples[0]
    tolerance = tolerance_of(job, run, model)

    # Check embeddings in eval mode, and without dropout also in training mode.
    if contract.whole:
        dropouts = [module for module in model.modules() if isinstance(module, DROPOUT)]
        with evaluating(model):
            _check_parts(contract, job, run, model, samples)
        if not has_batch_statistics(model):
            with evaluating(nn.ModuleList(dropouts)):
                _check_parts(contract, job, run, model, samples)

    with evaluating(model):
        one, weight = make_batch(contract, run, [first])
        two, twice = make_batch(contract, run, [first, first])
        if (contract.additive or contract.whole) and not contract.draws:
            contract.check_doubling("weight", weight, twice, 1e-6)

        # Compute the loss of the sample, and of the sample twice.
        before = random_states(run.device)
        inner = model.module if isinstance(model, Wrapped) else model
        draw = run.main and "tensorboard" in job.recipe.track
        with Drawing(inner, one) if draw else nullcontext() as drawn:
            once = float(contract.loss(model, one)[0])
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or has_drawn(before, run.device)

        # The second must be twice the first. A repeat that differs comes from a private generator.
        exact = contract.additive and not contract.draws
        if exact and not contract.is_double(once, both, tolerance):
            again = float(contract.loss(model, one)[0])
            contract.draws = abs(again - once) > tolerance * abs(once)
            if not contract.draws:
                contract.check_doubling("loss", once, both, tolerance)

        # Check the metrics on the first evaluation set.
        if job.eval_sets:
            evaluated = load_samples(first.reader, EVALUATED, 0)
            _check_metrics(contract, job, run, model, evaluated)
    return drawn.graph if drawn is not None else None


def _check_metrics(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
) -> None:
    """Check metrics on a few samples of an evaluation set, whose batches may have other keys."""
    evaluation = Contract(job.task)
    batch, _ = make_batch(evaluation, run, samples)
    outputs = evaluation.loss(model, batch)[1]

    # With a loss over the whole batch, metrics get nothing but columns and parts.
    if contract.whole:
        columns = columns_of(job.task, batch)
        outputs = parts_of(contract, model, batch, len(samples))
        batch = columns
    evaluation.check_metrics(batch, outputs, run.device)


def _check_parts(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
) -> None:
    """Check ``embed`` and ``batch_loss``: each sample alone, and all of them in both orders."""
    before = random_states(run.device)

    # Embed the first sample twice, then each of the others.
    again, *alone = [
        parts_of(contract, model, make_batch(contract, run, [one])[0], 1)
        for one in samples[:1] + samples
    ]
    batch, _ = make_batch(contract, run, samples)
    reverse, _ = make_batch(contract, run, samples[::-1])
    together = parts_of(contract, model, batch, len(samples))
    back = parts_of(contract, model, reverse, len(samples))
    if not contract.draws and not has_drawn(before, run.device):
        check_rows(contract, (together, back), alone, again, tolerance_of(job, run, model))
    check_loss(contract, together, columns_of(job.task, batch))


def _check_training(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    reloaded: Samples,
    graph: Any,
) -> Preflight:
    """Check in training mode: a batch, its halves and the batch again, with the same seeds."""
    tolerance = tolerance_of(job, run, model)
    half = len(samples) // 2
    moved: list[str] = []
    checks = Checks(
        model,
        parameters=run.ranks > 1 or job.exact,
        report=moved.append,
        state=content,
    )
    run_pass = partial(one_pass, contract, job, run, model, checks)

    # Run the batch, its halves (if they must add up to the batch), and the batch again.
    random = has_batch_statistics(model) or has_dropout(model)
    try:
        passes = [run_pass(samples)]
        if contract.additive and half and not random:
            passes += [run_pass(samples[:half]), run_pass(samples[half:])]
        passes.append(run_pass(reloaded))
        unit_error = other_units([one.units for one in passes])

        # Which FSDP2 units run may depend on the sample.
        several = len(set(passes[0].units)) > 1 and not has_batch_statistics(model)
        if several and not unit_error:
            unit_error = other_units(
                [run_pass([sample], backward=False).units for sample in samples]
            )
    except Inexact as error:
        raise BadInput(str(error)) from None
    finally:
        checks.units.closing.close()
    first, *halves, last = passes

    # The batch again must have the same loss.
    stateful = not _near(first.loss, last.loss, 1e-3 * tolerance)
    _reject(job, run, last, moved, unit_error, (first.loss, last.loss) if stateful else None)

    # The halves must add up to the batch.
    draws = contract.draws or any(one.draws for one in passes)
    linear = True
    if halves and not draws and not stateful:
        contract.check_sum(first.loss, [one.loss for one in halves], tolerance)
        linear = _is_linear(halves, last, 10 * tolerance)

    return Preflight(
        flops=last.flops / len(samples),
        additive=contract.additive or contract.whole,
        draws=draws,
        others=Others(drawn=any(one.others for one in passes)),
        metrics=_metrics(contract, last.outputs),
        unused=last.unused,
        moved=moved[0] if moved else "",
        stateful=stateful,
        linear=linear,
        graph=graph,
    )


def _is_linear(halves: list[Pass], whole: Pass, tolerance: float) -> bool:
    """Return whether each gradient is the sum of the gradients of the halves."""
    # Gradients that are 0 but for rounding (biases of keys) are compared with all the others.
    noise = 1e-4 * sum(size for _, size in whole.gradients.values())
    for name, (total, size) in whole.gradients.items():
        summed = sum(one.gradients.get(name, (0.0, 0.0))[0] for one in halves)
        if not _near(total, summed, tolerance, size + noise):
            return False
    return True


def _near(a: float, b: float, tolerance: float, size: float | None = None) -> bool:
    """Whether a and b are equal up to ``tolerance``, relative to ``size`` (default: a).

    True if one is not finite.
    """
    if not math.isfinite(a + b):
        return True
    return abs(a - b) <= tolerance * (abs(a) if size is None else size)


def _reject(
    job: Job, run: Run, last: Pass, moved: list[str], units: str, losses: tuple[float, float] | None
) -> None:
    """Raise BadInput for a model whose training would depend on the parallel layout.

    ``last``: a pass over a batch. ``moved``: buffers that a forward changed. ``units``: an FSDP2
    error. ``losses``: two different losses of the same samples and seeds.
    """
    if units:
        raise BadInput(units)
    if job.exact and moved:
        raise BadInput(
            f"batch.grain requires the same buffers on every process, but {changed(moved[0])}"
        )
    if job.exact and losses:
        raise BadInput(
            "batch.grain requires that the same samples with the same seeds give the same loss; "
            f"got {losses[0]:.9g} and {losses[1]:.9g}: the data set, the model or the loss keeps "
            "its own generator or counter. Use torch's global generator, or remove batch.grain"
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
            "(requires_grad_(False) in model()), or set --machine.find_unused_parameters true"
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
